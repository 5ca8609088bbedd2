#include "muster/checkpoint.hpp"

#include "base/file.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/user_files.hpp"
#include "checkpoint/files/write_plan.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"
#include "run/failures.hpp"
#include "state/training_position.hpp"
#include "storage/folder_tier.hpp"
#include "support/folder.hpp"
#include "support/forge.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::checkpoint::checkpoint_test {
namespace {

namespace fs = std::filesystem;
using test::Folder;
using test::forge;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

/// Tensors of every kind; `big` spans several pieces.
Tensors sample() {
  const auto numbers = at::arange(24, at::kFloat).reshape({4, 6});
  return {{"model/w", numbers},
          {"model/b.bias", numbers.to(at::kBFloat16)},
          {"model/half", numbers.to(at::kHalf)},
          {"model/mask", numbers.gt(3)},
          {"model/z", at::complex(numbers, -numbers).conj()},
          {"model/turned", numbers.t()},
          {"model/tied", numbers},
          {"model/count", at::full({}, 7, at::kLong)},
          {"model/nothing", at::empty({0, 3})},
          {"unsigned/16", numbers.to(at::kLong).neg().to(at::kUInt16)},
          {"unsigned/32", numbers.to(at::kLong).neg().to(at::kUInt32)},
          {"unsigned/64", numbers.to(at::kLong).neg().to(at::kUInt64)},
          {"big", at::arange(100'000, at::kDouble)},
          {"deep/er/down", at::arange(5, at::kByte)}};
}

/// Saves a checkpoint with these tensors and a file of the user's, which `parts` ranks would write, with the index 4.
void save(storage::Tier& tier, const Tensors& tensors, int parts) {
  const auto layout = make_layout(tensors);
  tier.begin(4);
  tier.create(4, state_name, layout.bytes);
  const OpenFile open = [&](storage::Alignment alignment) { return tier.open(4, state_name, alignment); };
  const auto writers =
      plan_writers(layout.bytes, piece_owners(layout, 1), std::vector(static_cast<std::size_t>(parts), 0),
                   {.max_writers_per_node = parts, .min_share_bytes = 1});
  FileEntry state{.name = state_name, .bytes = layout.bytes, .piece_bytes = piece_bytes_for(layout.bytes)};
  for (int part = 0; part < parts; ++part)
    for (const auto checksum : StateWriter().write(open, layout, tensors, pieces_of(writers, part)))
      state.piece_checksums.push_back(checksum);
  const Folder user;
  write_file(user / "notes.txt", "the user's own");
  const auto notes = copy_file(user.path(), "notes.txt", tier, 4);
  write_manifest(tier, {.index = 4,
                        .time = "2026-01-31T12:00:00Z",
                        .world_size = parts,
                        .position_json = {{"training_iteration", 5}, {"epoch", 2}},
                        .metrics = {{"loss", 0.25}},
                        .values = {{"best", 0.5}},
                        .tensors = layout.tensors,
                        .files = {state, notes}});
  tier.publish(4);
}

/// A checkpoint with those tensors and a file of the user's.
fs::path make_checkpoint(const fs::path& path, const Tensors& tensors, int parts = 1) {
  const Folder place;
  storage::FolderTier tier(place.path());
  save(tier, tensors, parts);
  fs::create_directories(path);
  fs::rename(tier.published(4), path);
  return path;
}

TEST(Progress, IsNotMadeByDrawingRandomNumbers) {
  const Folder folder;
  const auto content = [&](const std::string& run, int weight, int random) {
    make_checkpoint(folder / run / "checkpoint_000004", {{"model/w", at::full({30'000}, weight)},
                                                         {"z", at::full({30'000}, weight)},
                                                         {random_name, at::full({1, 70'000}, random, at::kByte)}});
    return run::point_of(folder / run)->content;
  };
  const auto before = content("before", 1, 1);
  EXPECT_FALSE(before.empty());
  EXPECT_EQ(content("drawn", 1, 2), before);
  EXPECT_NE(content("trained", 2, 1), before);
}

TEST(Share, DividesAnyCountAmongAnyParts) {
  for (std::uint64_t count = 0; count < 50; ++count)
    for (int parts = 1; parts < 9; ++parts) {
      std::uint64_t at = 0;
      for (int index = 0; index < parts; ++index) {
        const auto range = share_of(count, {index, parts});
        EXPECT_EQ(range.begin, at);
        EXPECT_GE(range.end - range.begin, count / parts);
        EXPECT_LE(range.end - range.begin, count / parts + 1);
        at = range.end;
      }
      EXPECT_EQ(at, count);
    }
}

TEST(Pieces, CoverTheFile) {
  for (const std::uint64_t bytes :
       {0ull, 1ull, 65535ull, 65536ull, 65537ull, 1ull << 26, (1ull << 26) + 1, 1ull << 40}) {
    const auto piece = piece_bytes_for(bytes);
    const auto count = piece_count(bytes, piece);
    EXPECT_EQ(piece % 4096, 0u);
    if (bytes == 0) {
      EXPECT_EQ(count, 0u);
      continue;
    }
    EXPECT_EQ(piece_range(bytes, piece, 0).begin, 0u);
    EXPECT_EQ(piece_range(bytes, piece, count - 1).end, bytes);
    EXPECT_LT(piece_range(bytes, piece, count - 1).begin, bytes);
  }
  EXPECT_EQ(crc32(std::as_bytes(std::span("123456789", 9))), 0xcbf43926u) << "the check value of CRC-32";
}

TEST(StateFile, KeepsEveryKindOfTensor) {
  for (const int parts : {1, 2, 3, 7}) {
    const Folder folder;
    const auto tensors = sample();
    const auto path = make_checkpoint(folder / "checkpoint", tensors, parts);
    const auto manifest = read_manifest(path);
    for (const auto& back :
         {read_tensors(path, manifest), MappedState::open(path, manifest.state_file())->tensors(manifest)}) {
      ASSERT_EQ(back.size(), tensors.size());
      for (const auto& [name, tensor] : tensors) {
        EXPECT_EQ(back.at(name).scalar_type(), tensor.scalar_type()) << name;
        EXPECT_EQ(back.at(name).sizes(), tensor.sizes()) << name;
        EXPECT_TRUE(at::equal(back.at(name), tensor.resolve_conj())) << name << " of " << parts << " parts";
      }
      EXPECT_TRUE(back.at("model/tied").is_same(back.at("model/w")));
    }
    EXPECT_EQ(verify_checkpoint(path).problem, "");
  }
}

TEST(StateFile, RefusesWhatCannotBeStored) {
  const auto number = at::full({1}, 1.0);
  for (const char* name : {"a//b", "/a", "a/", "a/../b", "./a", ""})
    EXPECT_SAYS(error_of([&] { check_storable({{name, number}}); }), "name has an empty part");
  EXPECT_SAYS(error_of([&] { check_storable({{"a", number}, {"a-b", number}, {"a/b/c", number}}); }), "a group too");
  EXPECT_SAYS(error_of([&] {
                check_storable({{"a", number.to_sparse()}});
              }),
              "it is a sparse tensor. Save it as to_dense(); a momentum buffer is sparse if the gradient is");
  EXPECT_SAYS(error_of([&] { check_storable({{"a", at::empty({3}, at::kMeta)}}); }), "plain values");
  for (const auto type : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const auto text = error_of([&] { check_storable({{"model/w", at::empty({3}, type)}}); });
    EXPECT_SAYS(text, "saving model/w: HDF5 has no type for");
    EXPECT_SAYS(text, "or its bytes: .view(torch::kUInt8)");
  }
  EXPECT_SAYS(error_of([&] {
                check_storable({{"a", at::full(std::vector<std::int64_t>(33, 1), 1.0)}});
              }),
              "more than 32 dimensions");
}

TEST(StateFile, RanksMustSaveTheSame) {
  const Tensors mine{{"a", at::full({2}, 1.0)}, {"b", at::full({2}, 1.0)}};
  const auto layout = unpack_layout(pack(make_layout(mine)));
  const auto checking = [&](const Tensors& other) { return error_of([&] { check_layout(layout, other); }); };
  EXPECT_EQ(checking(mine), "no error");
  EXPECT_SAYS(checking({{"a", at::full({2}, 1.0)}}), "saving b: this rank does not have it");
  EXPECT_SAYS(checking({{"a", mine.at("a")}, {"b", mine.at("b")}, {"c", mine.at("a")}}), "saving c: this rank has it");
  EXPECT_SAYS(checking({{"a", at::full({3}, 1.0)}, {"b", mine.at("b")}}), "saving a: its shape");
}

TEST(Manifest, ComesBackAsItWas) {
  const Folder folder;
  const auto manifest = read_manifest(make_checkpoint(folder / "checkpoint", sample()));
  EXPECT_EQ(manifest.index, 4);
  EXPECT_EQ(manifest.metrics.at("loss"), 0.25);
  EXPECT_EQ(to_text(from_text(to_text(manifest), "it")), to_text(manifest));
  EXPECT_SAYS(error_of([&] { to_text({.metadata = "\xff"}); }), "UTF-8");
}

TEST(Manifest, TrustsNothing) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  ASSERT_EQ(error_of([&] { from_text(forge(path, [](Json&) {}), "it"); }), "no error");
  const std::pair<const char*, std::function<void(Json&)>> changes[] = {
      {"leads out", [](Json& j) { j["files"][1]["name"] = "../notes.txt"; }},
      {"leads out", [](Json& j) { j["files"][1]["name"] = "/etc/passwd"; }},
      {"leads out", [](Json& j) { j["files"][1]["name"] = "a/../../b"; }},
      {"zero byte", [](Json& j) { j["files"][1]["name"] = std::string("a\0b", 3); }},
      {"leads out", [](Json& j) { j["tensors"][0]["name"] = "a/../b"; }},
      {"lists itself", [](Json& j) { j["files"][1]["name"] = "manifest.json"; }},
      {"is there twice", [](Json& j) { j["files"][1] = j["files"][0]; }},
      {"does not list state.h5", [](Json& j) { j["files"].erase(0); }},
      {"more or fewer checksums", [](Json& j) { j["files"][0]["crc32"].push_back(1); }},
      {"is not a number of 32 bits", [](Json& j) { j["files"][0]["crc32"][0] = -1; }},
      {"is not a number of 32 bits", [](Json& j) { j["files"][0]["crc32"][0] = 1ull << 40; }},
      {"odd size", [](Json& j) { j["files"][0]["piece_bytes"] = 0; }},
      {"odd size", [](Json& j) { j["files"][0]["bytes"] = ~0ull; }},
      {"is not that of its shape", [](Json& j) { j["tensors"][0]["shape"] = {100'001}; }},
      {"absurd", [](Json& j) { j["tensors"][0]["shape"] = {-1}; }},
      {"absurd",
       [](Json& j) {
         j["tensors"][0]["shape"] = {1ull << 62, 16};
       }},
      {"absurd",
       [](Json& j) {
         j["tensors"][0]["shape"] = {0, 1ull << 62, 1ull << 62};
         j["tensors"][0]["bytes"] = 0;
       }},
      {"absurd", [](Json& j) { j["tensors"][0]["shape"] = std::vector<int>(33, 1); }},
      {"absurd", [](Json& j) { j["tensors"][0]["offset"] = ~0ull; }},
      {"past the end", [](Json& j) { j["tensors"][0]["offset"] = 1ull << 60; }},
      {"overlaps another tensor", [](Json& j) { j["tensors"][4]["offset"] = j["tensors"][0]["offset"]; }},
      {"is unknown", [](Json& j) { j["tensors"][0]["type"] = "pickle"; }},
      {"is there twice", [](Json& j) { j["tensors"].push_back(j["tensors"][0]); }},
      {"which is not there", [](Json& j) { j["tensors"][0]["same_as"] = "model/gone"; }},
      {"differ in shape", [](Json& j) { j["tensors"][1]["same_as"] = j["tensors"][0]["name"]; }},
      {"not a list", [](Json& j) { j["tensors"] = 3; }},
      {"not a list", [](Json& j) { j["files"] = Json::object(); }},
      {"not an object", [](Json& j) { j["values"] = 3; }},
      {"not an object", [](Json& j) { j["progress"] = "x"; }},
      {"world_size", [](Json& j) { j["world_size"] = -2; }},
      {"out of range", [](Json& j) { j["index"] = 1ull << 40; }},
      {"must be string", [](Json& j) { j["time"] = 3; }},
      {"tensors", [](Json& j) { j.erase("tensors"); }},
      {"not a checkpoint's", [](Json& j) { j["format"] = "something"; }},
      {"of seen is neither true nor false",
       [](Json& j) {
         j["per_rank"] = {{"seen", 1}};
       }},
      {"names seen, which has no value",
       [](Json& j) {
         j["per_rank"] = {{"seen", true}};
       }},
      {"the value of seen is not a list",
       [](Json& j) {
         j["values"]["seen"] = 3;
         j["per_rank"] = {{"seen", true}};
       }},
      {"does not have one row for each rank", [](Json& j) { j["tensors"][0]["per_rank"] = true; }},
      {"the random state does not have one row of bytes", [](Json& j) { j["tensors"].back()["name"] = "random"; }},
      {"\"same_as\" is empty", [](Json& j) { j["tensors"][0]["same_as"] = ""; }},
      {"newer muster", [](Json& j) { j["version"] = 2; }},
      {"version", [](Json& j) { j["version"] = "1"; }},
  };
  for (const auto& [fact, change] : changes)
    EXPECT_SAYS(error_of([&, &change = change] { from_text(forge(path, change), "it"); }), fact);
  for (const char* text : {"", "{}", "null", "{\"checksum\": \"00000000\"\n}\n"})
    EXPECT_THROW(from_text(text, "it"), Error) << text;
}

/// The content of a run's report.
Json progress() {
  return Json::parse(R"({"training_iteration": 5, "epoch": 2, "epoch_complete": false, "global_step": 40,
    "samples_since_report": 3, "time_total_s": 1.5, "seed": 18446744073709551615, "preprocessor": null,
    "callbacks": {"EarlyStopping": [{"waited": 2}]}, "something new": {"a": 1},
    "positions": {"train": {"epoch": 2, "passes": 1, "consumed": 8, "window": 0, "global_batch_size": 4, "samples": 46,
                            "seed": 7, "something new": [1]}, "whole": null}})");
}

TEST(TrainingPosition, IsReadIntoAStruct) {
  const auto read = state::training_position_from_json(progress());
  EXPECT_TRUE(read.is_from_run);
  EXPECT_EQ(read.training_iteration, 5);
  EXPECT_EQ(read.epoch, 2);
  EXPECT_FALSE(read.epoch_complete);
  EXPECT_EQ(read.global_step, 40);
  EXPECT_EQ(read.samples_since_report, 3);
  EXPECT_EQ(read.time_total_s, 1.5);
  EXPECT_EQ(read.seed, ~std::uint64_t{0});
  EXPECT_EQ(read.positions.at("train").at("consumed"), 8);
  EXPECT_EQ(read.callbacks.at("EarlyStopping").at(0).at("waited"), 2);
  auto known = progress();
  known.erase("something new");
  known["epoch_counted"] = true;  // of a checkpoint that does not say
  known["several_reports"] = false;
  known["passes_before_more"] = 0;
  known["threads_per_worker"] = 0;
  EXPECT_EQ(to_json(read), known);
  const auto none = state::training_position_from_json(Json::object());
  EXPECT_SAYS(error_of([&] { state::training_position_from_json(3); }), "it is not an object");
  EXPECT_FALSE(none.is_from_run);
  EXPECT_EQ(none.epoch, 0);
}

TEST(Manifest, ProgressThatCannotBeIsDamage) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  const auto with = [&](const char* pointer, const Json& value) {
    return forge(path, [&](Json& json) {
      json["progress"] = progress();
      json["progress"][Json::json_pointer(pointer)] = value;
    });
  };
  EXPECT_EQ(error_of([&] { from_text(with("/something new", 3), "it"); }), "no error");
  EXPECT_EQ(error_of([&] { from_text(with("/seed", 0), "it"); }), "no error");
  const std::pair<const char*, std::vector<Json>> absurd[] = {
      {"/training_iteration", {"5", 5.0, -1, 1e300, true, nullptr, 1ull << 63, 1ull << 60, Json::array()}},
      {"/epoch", {"2", 1.5, -5, 1e300, nullptr, 1ull << 63, 1ull << 50, Json::object()}},
      {"/epoch_complete", {1.5, 1, "true", nullptr, Json::array()}},
      {"/global_step", {"40", 0.5, -1, 1e300, nullptr, 1ull << 63}},
      {"/time_total_s", {"1.5", -1, -1.0, 1e300, nullptr, Json::array()}},
      {"/seed", {"7", -1, 1.0, nullptr}},
      {"/positions", {nullptr, 3, Json::array(), "train"}},
      {"/positions/train", {3, "x", Json::array(), true}},
      {"/positions/train/epoch", {-1, "2", 2.0, 1ull << 63}},
      {"/positions/train/passes", {-1, "1", 1.5, nullptr}},
      {"/positions/train/consumed", {-1, 47, "8", 8.5, 1ull << 63}},
      {"/positions/train/window", {-1, "0", 1ull << 63}},
      {"/positions/train/global_batch_size", {0, -4, "4", 1ull << 63}},
      {"/positions/train/samples", {7, -1, "46", 1ull << 63}},
      {"/positions/train/seed", {-1, "7", 1.5}},
      {"/positions/train/draws", {3, "x", Json{{"count", -1}}, Json{{"count", 5}, {"weights", "7"}}}},
      {"/positions/train/buckets", {3, Json::array(), Json{{"samples", 1ull << 63}}, Json{{"lengths", -1}}}},
  };
  for (const auto& [pointer, values] : absurd)
    for (const auto& value : values) {
      const auto problem = error_of([&, &pointer = pointer] { from_text(with(pointer, value), "it"); });
      const std::string key(pointer);
      EXPECT_SAYS(problem, key.substr(key.rfind('/') + 1)) << value;
    }
  EXPECT_SAYS(error_of([&] { from_text(with("/positions/train/shuffle", 1), "it"); }),
              "\"shuffle\" is neither true nor false");
  EXPECT_SAYS(error_of([&] { from_text(with("/positions/train/in_loop", 1), "it"); }),
              "\"in_loop\" is neither true nor false");
  EXPECT_SAYS(error_of([&] { from_text(forge(path, [](Json& j) { j["metrics"]["training_iteration"] = 4; }), "it"); }),
              "is not that of its metrics");
  EXPECT_SAYS(error_of([&] { from_text(forge(path, [](Json& j) { j["world_size"] = 0; }), "it"); }), "world_size");
}

/// Calls visit(pointer) for every value inside `json`.
void each_value(const Json& json, const Json::json_pointer& at,
                const std::function<void(const Json::json_pointer&)>& visit) {
  visit(at);
  if (json.is_object())
    for (const auto& [key, value] : json.items()) each_value(value, at / key, visit);
  if (json.is_array())
    for (std::size_t i = 0; i < json.size(); ++i) each_value(json[i], at / i, visit);
}

TEST(Manifest, WhateverStandsThereIsReadOrIsDamage) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", {{"a", at::full({2}, 1.0)}, {"b", at::full({2}, 1)}});
  write_file(path / manifest_name, forge(path, [](Json& json) { json["progress"] = progress(); }));
  auto whole = Json::parse(read_file(path / manifest_name));
  whole.erase("checksum");
  const Json values[] = {nullptr, true, -1, 0, 1.5, 1e300, 1ull << 63, "x", "../x", Json::array(), Json::object()};
  int damaged = 0, tried = 0;
  each_value(whole, Json::json_pointer(), [&](const Json::json_pointer& at) {
    for (const auto& value : values) {
      ++tried;
      try {
        const auto manifest = from_text(forge(path, [&](Json& json) { json[at] = value; }), "it");
        const auto read = state::training_position_from_json(manifest.position_json);
        EXPECT_GE(read.epoch, 0);
        EXPECT_GE(read.training_iteration, 0);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data) << at.to_string() << " = " << value << ": " << error.what();
        ++damaged;
      }
    }
  });
  EXPECT_GT(damaged, tried / 2);
}

TEST(Manifest, JsonOfAnyDepthIsDamageNotACrash) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  const auto text = forge(path, [](Json& json) { json["metadata"] = "here"; });
  const auto nested = [&](std::size_t depth) {
    auto deep = text.substr(0, text.rfind("\n\"checksum\"") + 1);
    deep.replace(deep.find("\"here\""), 6, std::string(depth, '[') + std::string(depth, ']'));
    deep.resize(deep.size() - 1);  // the line's end, which with_checksum() adds
    return test::with_checksum(deep);
  };
  EXPECT_EQ(error_of([&] { from_text(nested(200), "it"); }), "no error");
  for (const std::size_t depth : {300, 140'000}) {
    write_file(path / manifest_name, nested(depth));
    EXPECT_SAYS(verify_checkpoint(path).problem, "levels deep");
  }
  fs::create_directory(folder / "foreign");
  write_file(folder / "foreign/metadata.json", std::string(140'000, '['));
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(folder / "foreign").get_metadata(); }), "levels deep");
}

TEST(Checkpoint, LinksOutsideAreNotFollowed) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  fs::rename(path / "notes.txt", folder / "outside.txt");
  fs::create_symlink(folder / "outside.txt", path / "notes.txt");
  EXPECT_SAYS(verify_checkpoint(path).problem, "symbolic link");
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(path).to_directory(folder / "copy"); }), "symbolic link");
  fs::remove(path / "notes.txt");
  fs::create_directory(path / "notes.txt");
  EXPECT_SAYS(verify_checkpoint(path).problem, "notes.txt: it is not a regular file");
  fs::remove(path / "notes.txt");
  fs::rename(folder / "outside.txt", path / "notes.txt");
  fs::rename(path / state_name, folder / "outside.h5");
  fs::create_symlink(folder / "outside.h5", path / state_name);
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(path).to_dict(); }), "symbolic link");
  fs::rename(path / manifest_name, folder / "outside.json");
  fs::create_symlink(folder / "outside.json", path / manifest_name);
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(path).to_dict(); }), "not a regular file");
  const Folder special;
  ASSERT_EQ(::mkfifo((special / "pipe").c_str(), 0600), 0);
  EXPECT_SAYS(error_of([&] { list_files(special.path()); }), "special file");
}

/// Changes the bytes of a file; they come back when the guard ends.
class Damaged {
 public:
  Damaged(fs::path path, const std::function<void(std::string&)>& change)
      : path_(std::move(path)), whole_(read_file(path_)) {
    auto bytes = whole_;
    change(bytes);
    put(bytes);
  }
  ~Damaged() { put(whole_); }

 private:
  void put(const std::string& bytes) const { std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes; }
  fs::path path_;
  std::string whole_;
};

TEST(Checkpoint, DamageIsSeen) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  ASSERT_EQ(verify_checkpoint(path).problem, "");
  for (const char* name : {state_name, manifest_name, "notes.txt"}) {
    const auto file = path / name;
    const auto size = fs::file_size(file);
    const auto step = std::max<std::uintmax_t>(1, size / 97);
    const auto expect_seen = [&](const char* how, std::uintmax_t at) {
      const auto problem = verify_checkpoint(path).problem;
      EXPECT_NE(problem.find(name), std::string::npos) << how << " at " << at << ": " << problem;
      if (std::string(name) != "notes.txt") {
        EXPECT_THROW(Checkpoint::from_directory(path).to_dict(), Error) << how << " at " << at;
      }
    };
    for (std::uintmax_t at = 0; at < size; at += step) {
      {
        const Damaged flipped(file,
                              [&](std::string& bytes) { bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8))); });
        expect_seen("flipped", at);
      }
      const Damaged truncated(file, [&](std::string& bytes) { bytes.resize(at); });
      expect_seen("truncated", at);
    }
    {
      const Damaged zeroed(file,
                           [&](std::string& bytes) { std::fill(bytes.begin(), bytes.begin() + 40 % size, '\0'); });
      expect_seen("zeroed", 0);
    }
    {
      const Damaged longer(file, [](std::string& bytes) { bytes += 'x'; });
      expect_seen("longer", size);
    }
    fs::rename(file, folder / "away");
    expect_seen("deleted", 0);
    fs::rename(folder / "away", file);
  }
  EXPECT_EQ(verify_checkpoint(path).problem, "");
}

TEST(Checkpoint, FromDictGoesWithItsLastCopy) {
  fs::path path;
  {
    double best = 0.5;
    const auto copy = Checkpoint::from_dict({{"best", best}});
    path = copy.path();
    const auto again = copy;
    EXPECT_EQ(again.to_dict().values.at("best"), 0.5);
    EXPECT_EQ(again.get_metadata(), Json::object());
    EXPECT_EQ(fs::status(path).permissions() & fs::perms::mask, fs::perms::owner_all);
  }
  EXPECT_FALSE(fs::exists(path));
}

/// The folders of from_dict() in `folder`.
int given_in(const fs::path& folder) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder))
    count += entry.path().filename().string().starts_with("muster-checkpoint-") ? 1 : 0;
  return count;
}

/// A process that the next test starts, and kills.
TEST(Checkpoint, GivesTwoAndWaits) {
  const char* const said = std::getenv("MUSTER_TEST_GIVE");
  if (said == nullptr) GTEST_SKIP() << "another test starts it";
  const double value = 1;
  const auto first = Checkpoint::from_dict({{"a", value}}), second = Checkpoint::from_dict({{"a", value}});
  const char word = 0;
  ASSERT_EQ(::write(std::atoi(said), &word, 1), 1);
  for (;;) ::pause();
}

TEST(Checkpoint, FromDictOfAKilledProcessGoesWithTheNext) {
  const Folder folder;
  const auto start = [&](int& said) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("TMPDIR", folder.path().c_str(), 1);
      ::setenv("MUSTER_TEST_GIVE", std::to_string(ends[1]).c_str(), 1);
      ::execl("/proc/self/exe", "checkpoint_test", "--gtest_filter=Checkpoint.GivesTwoAndWaits", nullptr);
      std::_Exit(1);
    }
    ::close(ends[1]);
    said = ends[0];
    char word;
    EXPECT_EQ(::read(said, &word, 1), 1);
    return child;
  };
  const auto end = [](pid_t child, int said) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(said);
  };
  int said[3];
  const auto killed = start(said[0]), lives = start(said[1]);
  EXPECT_EQ(given_in(folder), 4);
  end(killed, said[0]);
  EXPECT_EQ(given_in(folder), 4);
  const auto next = start(said[2]);
  EXPECT_EQ(given_in(folder), 4) << "two of each process that lives";
  end(lives, said[1]);
  end(next, said[2]);
}

TEST(Checkpoint, CopiesAreWhole) {
  const Folder folder;
  const auto checkpoint = Checkpoint::from_directory(make_checkpoint(folder / "checkpoint", sample()));
  checkpoint.to_directory(folder / "a/copy");
  const auto info = verify_checkpoint(folder / "a/copy");
  EXPECT_EQ(info.problem, "");
  EXPECT_EQ(info.training_iteration, 5);
  EXPECT_EQ(info.epoch, 2);
  EXPECT_EQ(read_file(folder / "a/copy/notes.txt"), "the user's own");
  checkpoint.to_directory(folder / "a/copy");
  EXPECT_EQ(verify_checkpoint(folder / "a/copy").problem, "") << "the same once more changes nothing";
  const auto other = Checkpoint::from_directory(make_checkpoint(folder / "other", {{"other", at::full({3}, 1.0)}}));
  EXPECT_SAYS(error_of([&] { other.to_directory(folder / "a/copy"); }), "another file of that name is there");
  EXPECT_EQ(verify_checkpoint(folder / "a/copy").problem, "") << "nothing is written over";
  double best = 0;
  Checkpoint::from_directory(folder / "a/copy").load("best", best);
  EXPECT_EQ(best, 0.5);
  EXPECT_SAYS(error_of([&] { checkpoint.load("worst", best); }), "worst: not in the checkpoint");
}

TEST(Checkpoint, ANameThatMovesIsResolvedWhenItIsOpened) {
  const Folder folder;
  const auto one = make_checkpoint(folder / "one", {{"w", at::full({3}, 1.0)}}),
             other = make_checkpoint(folder / "other", {{"w", at::full({3}, 2.0)}, {"more", at::full({3}, 3.0)}});
  const auto name = folder / "best";
  fs::create_directory_symlink(one, name);
  auto checkpoint = Checkpoint::from_directory(name);
  EXPECT_EQ(checkpoint.path(), one);
  fs::remove(name);
  fs::create_directory_symlink(other, name);
  checkpoint.set_metadata({{"by", "one"}});
  EXPECT_EQ(read_manifest(one).metadata, (Json{{"by", "one"}}));
  EXPECT_EQ(read_manifest(other).metadata, Json::object());
  EXPECT_EQ(checkpoint.get_metadata(), (Json{{"by", "one"}}));
  EXPECT_EQ(checkpoint.to_dict().tensors.size(), 1U);
  auto w = at::zeros({3});
  checkpoint.load("w", w);
  EXPECT_EQ(w[0].item<double>(), 1);
  checkpoint.to_directory(folder / "copy");
  EXPECT_EQ(Checkpoint::from_directory(folder / "copy").to_dict().tensors.size(), 1U);
  EXPECT_EQ(Checkpoint::from_directory(name).to_dict().tensors.size(), 2U);
  EXPECT_EQ(verify_checkpoint(name).path, name) << "called as it was given";
}

TEST(Checkpoint, ReadersAndWritersOfANameThatMovesSeeOneCheckpoint) {
  const Folder folder;
  const auto one = make_checkpoint(folder / "one", {{"w", at::full({3}, 1.0)}}),
             other = make_checkpoint(folder / "other", {{"w", at::full({3}, 2.0)}, {"more", at::full({900}, 3.0)}});
  const auto name = folder / "best";
  fs::create_directory_symlink(one, name);
  std::atomic<bool> is_done = false;
  std::thread job([&] {
    for (int i = 0; !is_done; ++i) {
      fs::create_directory_symlink(i % 2 == 0 ? other : one, folder / "next");
      fs::rename(folder / "next", name);
    }
  });
  std::string problems;
  for (int i = 0; i < 40; ++i) {
    auto checkpoint = Checkpoint::from_directory(name);
    checkpoint.set_metadata({{"tensors", checkpoint.to_dict().tensors.size()}});
    checkpoint.to_directory(folder / "copy" / std::to_string(i));
    problems += verify_checkpoint(folder / "copy" / std::to_string(i)).problem + verify_checkpoint(name).problem;
  }
  is_done = true;
  job.join();
  EXPECT_EQ(problems + verify_checkpoint(one).problem + verify_checkpoint(other).problem, "");
  for (const auto& [path, tensors] : {std::pair(one, 1), std::pair(other, 2)})
    if (const auto metadata = read_manifest(path).metadata; !metadata.empty()) {
      EXPECT_EQ(metadata, (Json{{"tensors", tensors}})) << path;
    }
}

TEST(Checkpoint, AnotherFolderUnderItsNameIsRefused) {
  const Folder folder;
  const auto one = make_checkpoint(folder / "one", {{"w", at::full({3}, 1.0)}}),
             other = make_checkpoint(folder / "other", {{"w", at::full({3}, 2.0)}});
  auto checkpoint = Checkpoint::from_directory(one);
  fs::rename(one, folder / "away");
  fs::rename(other, one);
  auto w = at::zeros({3});
  const std::function<void()> calls[] = {[&] { checkpoint.to_dict(); }, [&] { checkpoint.load("w", w); },
                                         [&] { checkpoint.get_metadata(); },
                                         [&] {
                                           checkpoint.set_metadata({{"by", "one"}});
                                         },
                                         [&] { checkpoint.to_directory(folder / "copy"); }};
  for (const auto& call : calls) EXPECT_SAYS(error_of(call), "another folder has its name now. Open it again");
  EXPECT_EQ(read_manifest(one).metadata, Json::object());
  EXPECT_EQ(w[0].item<double>(), 0);
  EXPECT_FALSE(is_checkpoint(folder / "copy"));
  fs::rename(one, other);
  fs::rename(folder / "away", one);
  checkpoint.load("w", w);
  EXPECT_EQ(w[0].item<double>(), 1);
}

TEST(Checkpoint, ACopyIsComparedWithItsManifest) {
  const Folder folder;
  const auto path = make_checkpoint(folder / "checkpoint", sample());
  const auto checkpoint = Checkpoint::from_directory(path);
  for (const char* file : {state_name, "notes.txt"}) {
    const Damaged flipped(path / file, [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); });
    const auto copy = folder / (std::string("copy of ") + file);
    EXPECT_SAYS(error_of([&] { checkpoint.to_directory(copy); }), "its checksums are not those of the manifest");
    EXPECT_FALSE(is_checkpoint(copy)) << "the manifest is copied last";
  }
  checkpoint.to_directory(folder / "copy");
  EXPECT_EQ(verify_checkpoint(folder / "copy").problem, "");
}

TEST(Checkpoint, CopiesKeepTheLongestNames) {
  const Folder folder;
  const std::string name(255, 'x'), other = name.substr(1) + "y";
  fs::create_directory(folder / "foreign");
  write_file(folder / "foreign" / name, "one");
  write_file(folder / "foreign" / other, "another");
  Checkpoint::from_directory(folder / "foreign").to_directory(folder / "copy");
  EXPECT_EQ(read_file(folder / "copy" / name), "one");
  EXPECT_EQ(read_file(folder / "copy" / other), "another");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder / "copy"), {}), 2) << "no temporary file is left";
}

TEST(Checkpoint, OneThatAStartHasFoundDamagedIsListed) {
  const Folder run;
  const storage::FolderTier tier(run.path());
  for (const int index : {3, 4, 5}) {
    make_checkpoint(tier.published(index), {});
    auto manifest = read_manifest(tier.published(index));
    manifest.index = index;
    fs::remove(tier.published(index) / manifest_name);
    write_manifest(tier.published(index), manifest);
  }
  fs::remove(tier.published(4) / "state.h5");
  const auto lost = tier.quarantine(4), other = tier.quarantine(3);
  const auto infos = list_checkpoints(run.path());
  ASSERT_EQ(infos.size(), 3U);
  EXPECT_EQ(infos[0].path, other);
  EXPECT_SAYS(infos[0].problem, "a start has found it damaged; `muster checkpoint verify` says what is wrong with it");
  EXPECT_EQ(infos[1].path, lost);
  EXPECT_SAYS(infos[1].problem, "state.h5");
  EXPECT_EQ(infos[2].problem, "");
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(infos[i].index, static_cast<int>(i) + 3);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(infos[i].code, ExitCode::data);
}

TEST(Checkpoint, OneThatVanishesIsNotListed) {
  const Folder run;
  const storage::FolderTier tier(run.path());
  make_checkpoint(tier.published(4), {});
  std::atomic<bool> is_done = false;
  std::thread job([&] {  // publishes and prunes
    for (int index = 5; !is_done; ++index) {
      fs::copy(tier.published(index - 1), tier.saving(index));
      auto manifest = read_manifest(tier.saving(index));
      manifest.index = index;
      fs::remove(tier.saving(index) / manifest_name);
      write_manifest(tier.saving(index), manifest);
      rename_new(tier.saving(index), tier.published(index));
      tier.remove(index - 1);
    }
  });
  std::string problems;
  for (int i = 0; i < 300; ++i) {
    const auto infos = list_checkpoints(run.path());
    EXPECT_FALSE(infos.empty());
    for (const auto& info : infos) problems += info.problem.empty() ? "" : info.problem + "\n";
  }
  is_done = true;
  job.join();
  EXPECT_EQ(problems, "");
}

TEST(Checkpoint, AFolderWithTheNameOfAFileOfOursIsRefused) {
  const Folder folder;
  for (const char* name : {"manifest.json", "state.h5", "validation.json"}) {
    fs::create_directories(folder / name / name);
    write_file(folder / name / name / "x", "1");
    EXPECT_SAYS(error_of([&] { list_user_files(folder / name); }), "it holds a folder " + std::string(name));
  }
}

TEST(Checkpoint, FilesThatItCannotHoldAreRefused) {
  const Folder folder;
  write_file(folder / "a\xff", "1");
  EXPECT_SAYS(error_of([&] { list_user_files(folder.path()); }), "the name of the file");
  const std::vector<UserFiles> ranks{{.names = {"a/b"}}, {.names = {"a"}}};
  EXPECT_SAYS(error_of([&] { owners_of(ranks); }), "a is a file of rank 1 and a folder of rank 0");
}

TEST(Checkpoint, PlacesThatCannotBe) {
  EXPECT_SAYS(error_of([] { Checkpoint::from_directory(std::string(300, 'x')); }),
              "File name too long. Check the path");
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("TMPDIR", "/proc", 1);
  EXPECT_SAYS(error_of([] { Checkpoint::from_dict({}); }), "Set TMPDIR to a folder with space");
  before == nullptr ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", kept.c_str(), 1);
}

TEST(Checkpoint, MetadataTravels) {
  const Folder folder;
  auto checkpoint = Checkpoint::from_directory(make_checkpoint(folder / "checkpoint", sample()));
  EXPECT_EQ(checkpoint.get_metadata(), Json::object());
  checkpoint.set_metadata({{"by", "zoë"}});
  EXPECT_EQ(checkpoint.get_metadata(), (Json{{"by", "zoë"}}));
  EXPECT_EQ(verify_checkpoint(checkpoint.path()).problem, "");

  Json deep = 1;
  for (int level = 0; level < 300; ++level) deep = Json::array({std::move(deep)});
  for (const auto& unreadable : {deep, Json("\xff")})
    EXPECT_SAYS(error_of([&] { checkpoint.set_metadata(unreadable); }), "Nothing was changed");
  EXPECT_EQ(checkpoint.get_metadata(), (Json{{"by", "zoë"}}));

  fs::create_directory(folder / "foreign");
  write_file(folder / "foreign/weights.bin", "abc");
  auto foreign = Checkpoint::from_directory(folder / "foreign");
  EXPECT_EQ(foreign.get_metadata(), Json::object());
  for (const auto& unreadable : {deep, Json("\xff")})
    EXPECT_SAYS(error_of([&] { foreign.set_metadata(unreadable); }), "Nothing was changed");
  EXPECT_EQ(foreign.get_metadata(), Json::object());
  foreign.set_metadata({{"n", 1}});
  EXPECT_EQ(foreign.get_metadata().at("n"), 1);
  foreign.to_directory(folder / "copy");
  EXPECT_EQ(read_file(folder / "copy/weights.bin"), "abc");
  EXPECT_EQ(Checkpoint::from_directory(folder / "copy").get_metadata(), (Json{{"n", 1}}));
  EXPECT_SAYS(error_of([&] { foreign.to_dict(); }), "not a checkpoint that muster wrote");
  EXPECT_SAYS(error_of([&] { Checkpoint::from_directory(folder / "nowhere"); }), "no such directory");
}

TEST(Tier, OnlyOursAreFound) {
  const Folder run;
  for (const char* name :
       {"checkpoint_000002", "checkpoint_000010", "checkpoint_000011.damaged", ".checkpoint_000012.saving",
        ".checkpoint_000001.pruning", "checkpoint_7", "checkpoint_000003.bak", "checkpoint_x",
        ".checkpoint_000099.other", "logs", "checkpoint_000098x"})
    fs::create_directory(run / name);
  fs::create_symlink(run / "logs", run / "checkpoint_000050");
  std::ofstream(run / "checkpoint_000051") << "a file";
  const storage::FolderTier tier(run.path());
  const auto found = tier.list();
  ASSERT_EQ(found.published.size(), 2u);
  EXPECT_EQ(found.published.rbegin()->second.filename(), "checkpoint_000010");
  EXPECT_EQ(found.damaged.size(), 1u);
  EXPECT_EQ(found.unfinished.size(), 2u);
  EXPECT_EQ(found.others.size(), 2u);
  EXPECT_EQ(*found.indices.rbegin(), 51) << "their numbers are taken";
  fs::create_directory(run / "checkpoint_000002.damaged");
  EXPECT_EQ(tier.quarantine(2).filename(), "checkpoint_000002.damaged.1");
  EXPECT_EQ(tier.list().damaged.size(), 3u);
}

/// A place that is not a folder: files are kept in memory until the checkpoint is published.
class MemoryTier : public storage::FolderTier {
 public:
  using FolderTier::FolderTier;

  void begin(int /*index*/) override { files_.clear(); }
  void create(int /*index*/, const std::string& name, std::uint64_t bytes) const override {
    files_[name].resize(bytes);
  }
  std::unique_ptr<storage::SavedFile> open(int /*index*/, const std::string& name,
                                           storage::Alignment /*alignment*/) const override {
    struct Memory : storage::SavedFile {
      explicit Memory(std::string& bytes) : bytes(bytes) {}
      void write_at(std::span<const std::byte> from, std::uint64_t offset) override {
        std::memcpy(bytes.data() + offset, from.data(), from.size());
      }
      void finish() override {}
      std::string& bytes;
    };
    return std::make_unique<Memory>(files_.at(name));
  }
  void publish(int index) const override {
    fs::create_directory(published(index));
    for (const auto& [name, bytes] : files_) write_file(published(index) / name, bytes);
  }

 private:
  mutable std::map<std::string, std::string> files_;
};

TEST(Tier, APlaceThatIsNotAFolderGetsTheSameCheckpoint) {
  const Folder one, other;
  storage::FolderTier folder(one.path());
  MemoryTier memory(other.path());
  auto tensors = sample();
  tensors["large"] = at::arange(3'000'001, at::kDouble);  // large enough for direct writes
  save(folder, tensors, 3);
  save(memory, tensors, 3);
  EXPECT_EQ(verify_checkpoint(memory.published(4)).problem, "");
  for (const char* name : {"manifest.json", "state.h5", "notes.txt"})
    EXPECT_EQ(read_file(memory.published(4) / name), read_file(folder.published(4) / name)) << name;
}

TEST(Tier, TheStateHasNoTimesOfItsOwn) {
  const Folder run;
  storage::FolderTier folder(run.path());
  save(folder, sample(), 1);
  const hdf5::Lock lock;
  const auto file = hdf5::open_file(folder.published(4) / "state.h5");
  for (const char* name : {"/", "deep", "deep/er", "deep/er/down", "model", "model/b.bias"}) {
    H5O_info_t info{};
    ASSERT_GE(H5Oget_info_by_name2(file.get(), name, &info, H5O_INFO_TIME, H5P_DEFAULT), 0) << name;
    EXPECT_EQ(info.ctime, 0) << name;
  }
}

TEST(Tier, ARunThatIsRemovedDuringASaveIsNotMadeAgain) {
  const Folder folder;
  const auto run = folder / "run";
  fs::create_directory(run);
  storage::FolderTier tier(run);
  tier.begin(0);
  tier.create(0, "in/a/folder", 1);
  fs::remove_all(run);
  for (const char* name : {"plain", "in/a/folder"})
    EXPECT_SAYS(error_of([&] { tier.create(0, name, 1); }), "No such file or directory") << name;
  EXPECT_FALSE(fs::exists(run));
}

TEST(Rollbacks, TakeBackWhatCameBetween) {
  const Folder run;
  const auto line = [&](int count) {
    std::vector<int> kept;
    const auto steps = read_rollbacks(run.path());
    for (int index = 0; index < count; ++index)
      if (!is_rolled_back(steps, index)) kept.push_back(index);
    return kept;
  };
  EXPECT_EQ(line(3), (std::vector<int>{0, 1, 2}));
  add_rollback(run.path(), {.to = 2, .last_index = 4});
  EXPECT_EQ(line(5), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(line(8), (std::vector<int>{0, 1, 2, 5, 6, 7}));
  add_rollback(run.path(), {.to = 6, .last_index = 7});
  EXPECT_EQ(line(9), (std::vector<int>{0, 1, 2, 5, 6, 8}));
  add_rollback(run.path(), {.to = 4, .last_index = 8});
  EXPECT_EQ(line(10), (std::vector<int>{0, 1, 2, 3, 4, 9})) << "one that was given up leads on again";
  add_rollback(run.path(), {.to = 1, .last_index = 9});
  EXPECT_EQ(line(11), (std::vector<int>{0, 1, 10}));
  for (const char* text :
       {"{}", "3", "[3]", R"([{"to": 1}])", R"([{"to": 3, "over": 2}])", R"([{"to": -1, "over": 2}])",
        R"([{"to": 1, "over": 1e300}])", R"([{"to": "1", "over": 2}])", "["}) {
    write_file(run / "steps_back.json", text);
    EXPECT_SAYS(error_of([&] { read_rollbacks(run.path()); }), "steps_back.json") << text;
  }
}

TEST(Retention, WhatWasRolledBackGoesFirst) {
  const std::vector<ScoredCheckpoint> all{{0, {}}, {1, {}}, {.index = 2, .score = {}, .rolled_back = true}, {3, {}}};
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 2}), (std::vector<int>{0, 2}));
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 3}), (std::vector<int>{2}));
  const std::vector<ScoredCheckpoint> scored{{.index = 0, .score = 9, .rolled_back = true}, {1, 1.0}, {2, 2.0}};
  const CheckpointConfig best{.num_to_keep = 2, .checkpoint_score_attribute = "accuracy"};
  EXPECT_EQ(indices_to_prune(scored, best), std::vector<int>{0}) << "it takes no place, however good it was";
  const std::vector<ScoredCheckpoint> last{{0, {}}, {1, {}}, {.index = 2, .score = {}, .rolled_back = true}};
  EXPECT_EQ(indices_to_prune(last, {.num_to_keep = 1}), (std::vector<int>{0, 2})) << "it is not the newest of the run";
}

TEST(Retention, KeepsTheNewestOrTheBest) {
  const std::vector<ScoredCheckpoint> all{{0, 3.0}, {1, 9.0}, {2, std::nan("")}, {3, {}}, {4, 9.0}, {5, 1.0}};
  EXPECT_EQ(indices_to_prune(all, {}), std::vector<int>{});
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 6}), std::vector<int>{});
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 2}), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(indices_to_prune(all, {.num_to_keep = 1}), (std::vector<int>{0, 1, 2, 3, 4}));
  CheckpointConfig best{.num_to_keep = 1, .checkpoint_score_attribute = "accuracy"};
  EXPECT_EQ(indices_to_prune(all, best), (std::vector<int>{0, 1, 2, 3})) << "the newer of the best, and the newest";
  best.num_to_keep = 3;
  EXPECT_EQ(indices_to_prune(all, best), (std::vector<int>{2, 3}));
  best.checkpoint_score_order = ScoreOrder::min;
  EXPECT_EQ(indices_to_prune(all, best), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(indices_to_prune({}, best), std::vector<int>{});
  EXPECT_EQ(score_of({{"loss", 2}}, "loss"), 2.0);
  EXPECT_EQ(score_of({{"loss", nullptr}}, "loss"), std::nullopt);
  EXPECT_EQ(score_of({}, "loss"), std::nullopt);
}

}  // namespace
}  // namespace muster::detail::checkpoint::checkpoint_test
