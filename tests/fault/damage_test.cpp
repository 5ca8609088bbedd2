// Damaged files, and disks that do not write everything. With all ranks.
#include "support/job.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/store.hpp"
#include "comm/on_ranks.hpp"
#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "support/sick_writes.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace muster {
namespace {

namespace fs = std::filesystem;
using detail::checkpoint::CheckpointContents;
using detail::checkpoint::CheckpointStore;
using detail::comm::run_on_root;
using test::world;

void by_root(const std::function<void()>& work) {
  run_on_root(world(), [&] { return work(), std::string(); });
}

/// A small checkpoint's, with a file of the user's in a folder.
CheckpointContents contents_of(int value, const fs::path& users) {
  return {.state = {.tensors = {{"model/w", at::arange(100, at::kFloat).add(value)},
                                {"model/nothing", at::empty({0})},
                                {"best", at::full({}, value, at::kLong)}},
                    .values = {{"model", Json::object()}}},
          .random_state = "rank " + std::to_string(world().rank()),
          .directory = users,
          .position_json = {{"training_iteration", value}, {"epoch", value}},
          .metrics = {{"loss", 0.5}}};
}

std::string content_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}

TEST(Damage, OfAnyRegionIsSeenAndTheOneBeforeIsTaken) {
  const auto run = test::shared_folder(), users = test::shared_folder(), logs = test::shared_folder();
  by_root([&] {
    fs::create_directory(users / "notes");
    put(users / "notes/a.txt", "the user's own words");
  });
  {
    CheckpointStore store(world(), run, {});
    store.commit(contents_of(1, users));
    store.commit(contents_of(2, users));
  }
  const auto newest = run / "checkpoint_000001", log = logs / ("log." + std::to_string(world().rank()));
  std::map<std::string, std::string> whole;
  for (const auto& name : detail::checkpoint::list_files(newest)) whole[name] = content_of(newest / name);
  ASSERT_TRUE(whole.contains("manifest.json") && whole.contains("state.h5") && whole.contains("notes/a.txt"));
  world().barrier();

  const auto expect_seen = [&](const std::string& name, const std::string& what) {
    by_root([&] { put(log, ""); });
    if (world().rank() == 0) detail::log::write_to(log);
    CheckpointStore store(world(), run, {});
    const auto taken = store.newest();
    detail::log::flush();
    if (world().rank() == 0) detail::log::write_to({});
    ASSERT_TRUE(taken) << what;
    EXPECT_EQ(taken->path(), run / "checkpoint_000000") << what;
    EXPECT_TRUE(at::equal(store.read(*taken).state.tensors.at("best"), at::full({}, 1, at::kLong))) << what;
    if (world().rank() == 0) {
      const auto warning = content_of(log);
      EXPECT_NE(warning.find("checkpoint_000001 is damaged"), std::string::npos) << what << ": " << warning;
      EXPECT_NE(warning.find(name), std::string::npos) << what << ": " << warning;
    }
    by_root([&] {
      fs::rename(run / "checkpoint_000001.damaged", newest);
      put(newest / name, whole.at(name));
    });
  };

  int tried = 0;
  for (const auto& [name, bytes] : whole) {
    const auto region = std::max<std::size_t>(8, bytes.size() / 150);
    for (std::size_t at = 0; at < bytes.size(); at += region) {
      const auto length = std::min(region, bytes.size() - at);
      auto flipped = bytes, zeroed = bytes;
      flipped[at + tried % length] = static_cast<char>(flipped[at + tried % length] ^ (1 << tried % 8));
      zeroed.replace(at, length, length, '\0');
      for (const auto& damaged : {flipped, zeroed, bytes.substr(0, at)}) {
        if (damaged == bytes) continue;  // what is zero already
        by_root([&, &name = name] { put(newest / name, damaged); });
        expect_seen(name, name + " from byte " + std::to_string(at) + ", " + std::to_string(damaged.size()) + " bytes");
        ++tried;
      }
    }
    by_root([&, &name = name] { put(newest / name, bytes + "x"); });
    expect_seen(name, name + " too long");
    by_root([&, &name = name] { fs::remove(newest / name); });
    expect_seen(name, name + " deleted");
  }
  EXPECT_GT(tried, 500);
  const auto last = CheckpointStore(world(), run, {}).newest();
  ASSERT_TRUE(last);
  EXPECT_EQ(last->path(), newest) << "it is whole again";
}

/// A run of two epochs with a state, its exit code.
int count(const fs::path& storage, std::int64_t& seen) {
  test::Job job{.storage = storage, .options = {.run_config = {.name = "run"}}};
  return test::run(job,
                   [&](Session& session, const Config&) {
                     auto state = session.state({{"seen", seen}});
                     state.restore();
                     for ([[maybe_unused]] auto epoch : session.epochs(2)) {
                       ++seen;
                       session.report({{"seen", seen}}, state);
                     }
                   })
      .first;
}

TEST(Damage, OfAllCheckpointsIsRefused) {
  const auto storage = test::shared_folder(), run = storage / "run";
  std::int64_t seen = 0;
  ASSERT_EQ(count(storage, seen), 0);
  std::vector<fs::path> files;
  for (const auto& info : list_checkpoints(run)) files.push_back(info.path / "state.h5");
  ASSERT_EQ(files.size(), 2u);
  world().barrier();
  const auto flip = [&] {
    for (const auto& file : files) {
      auto bytes = content_of(file);
      bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
      put(file, bytes);
    }
  };
  // Finished or not: a third epoch would have to go on from one of them.
  by_root([&] {
    flip();
    auto params = Json::parse(content_of(run / "params.json"));
    params["finished"] = false;
    put(run / "params.json", params.dump());
  });
  for (int attempt = 0; attempt < 2; ++attempt) {
    seen = 100;
    EXPECT_EQ(count(storage, seen), 65);
    EXPECT_EQ(seen, 100) << "nothing was trained";
  }
  by_root([&] {
    for (auto& file : files) file = file.parent_path().string() + ".damaged/state.h5";
    flip();
  });
  seen = 100;
  EXPECT_EQ(count(storage, seen), 0) << "mended, it goes on";
  EXPECT_EQ(seen, 2);
}

TEST(UnevenShards, EverySampleOnceAndNoHang) {
  for (const std::int64_t samples : {1, 2, 3, 5, 7, 16, 17})
    for (const std::int64_t batch_size : {1, 3}) {
      std::vector<std::int64_t> mine;
      const auto data = Dataset::from_tensors({{"x", at::arange(samples)}});
      test::Job job{.storage = test::shared_folder(),
                    .options = {.run_config = {.name = "uneven"}, .datasets = {{"train", data}}}};
      const auto [code, result] = test::run(job, [&](Session& session, const Config&) {
        for ([[maybe_unused]] auto epoch : session.epochs(2)) {
          Mean mean;
          for (auto& batch :
               session.get_dataset_shard().iter_torch_batches({.batch_size = batch_size, .shuffle = true})) {
            const auto counted = batch["x"].slice(0, 0, batch.size());
            for (std::int64_t i = 0; i < counted.numel(); ++i) mine.push_back(counted[i].item<std::int64_t>());
            if (batch.size() > 0) mean.add(counted.to(at::kDouble).mean(), batch.size());
          }
          session.report({{"mean", mean}});
        }
      });
      ASSERT_EQ(code, 0);
      std::vector<int> times(static_cast<std::size_t>(samples), 0);
      for (const auto& text : world().all_gather(Json(mine).dump()))
        for (const auto& sample : Json::parse(text)) ++times[sample.get<std::size_t>()];
      for (std::size_t sample = 0; sample < times.size(); ++sample)
        EXPECT_EQ(times[sample], 2) << "sample " << sample << " of " << samples;
      for (const auto& row : result->metrics_history) {
        EXPECT_EQ(row.at("num_samples"), samples);
        EXPECT_NEAR(row.at("mean").get<double>(), static_cast<double>(samples - 1) / 2, 1e-12);
      }
    }
}

TEST(Names, ThatLeadElsewhereAreRefused) {
  const auto storage = test::shared_folder();
  by_root([&] {
    fs::create_directory(storage / "elsewhere");
    fs::create_directory_symlink(storage / "elsewhere", storage / "link");
    fs::create_directory(storage / "run");
    fs::create_directory_symlink(storage / "elsewhere", storage / "run/logs");
  });
  const auto code = [&](std::vector<std::string> flags) {
    test::Job job{.storage = storage, .flags = std::move(flags), .options = {.run_config = {.name = "plain"}}};
    return test::run(job, [](Session&, const Config&) { FAIL() << "it was trained"; }).first;
  };
  for (const char* name : {"../up", "..", ".", "", "a/b", "a/../b", "/absolute", "run/..", ".hidden", "a\nb", "a\x7f",
                           "link", "run", "caf\xe9"})
    EXPECT_EQ(code({"--name", name}), 64) << name;
  EXPECT_EQ(code({"--name", std::string(201, 'a')}), 64);
  for (const char* place : {"s3://bucket", "hdfs://host/path"}) EXPECT_EQ(code({"--storage", place}), 64) << place;
  for (const char* from : {"../none", "/nonexistent/checkpoint_000000"})
    EXPECT_EQ(code({"--resume", from}), 65) << from;
  world().barrier();
  EXPECT_TRUE(fs::is_empty(storage / "elsewhere"));
}

TEST(SickWrites, InterruptedAndShortOnesAreGoneOnWith) {
  const auto run = test::shared_folder(), users = test::shared_folder();
  by_root([&] { put(users / "a.txt", std::string(100'000, 'x')); });
  CheckpointStore store(world(), run, {});
  for (const char* name : {"state.h5", "manifest.json", "a.txt"}) {
    auto contents = contents_of(1, users);
    contents.state.tensors["large"] = at::arange(100'000, at::kDouble);
    const test::SickWrites sick(name);
    const auto saved = store.commit(contents);
    if (world().rank() == 0) {
      EXPECT_GT(sick.count(), 1) << name;
      EXPECT_EQ(verify_checkpoint(saved.path()).problem, "") << name;
    }
    EXPECT_TRUE(at::equal(store.read(saved).state.tensors.at("large"), contents.state.tensors.at("large"))) << name;
  }
}

TEST(SickWrites, AFullQuotaOrADiskThatOnlyReadsIsEverybodysError) {
  const auto run = test::shared_folder(), users = test::shared_folder();
  by_root([&] { put(users / "a.txt", "text"); });
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1, users));
  const struct {
    int error;
    const char *fact, *remedy;
  } faults[] = {{EDQUOT, "quota exceeded", "Make room"},
                {EROFS, "Read-only", "Check the permissions"},
                {EIO, "Input/output error", "Check the disk"}};
  for (const char* name : {"state.h5", "manifest.json", "a.txt"})
    for (const auto& fault : faults) {
      std::string said = "no error";
      try {
        const test::SickWrites sick(name, fault.error);
        store.commit(contents_of(2, users));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::retry);
        said = error.what();
      }
      for (const auto* part : {fault.fact, fault.remedy, name}) EXPECT_NE(said.find(part), std::string::npos) << said;
      for (const auto& other : world().all_gather(said)) EXPECT_EQ(other, said) << "the same on all ranks";
      const auto left = CheckpointStore(world(), run, {}).newest();
      ASSERT_TRUE(left);
      EXPECT_EQ(left->path(), run / "checkpoint_000000") << name;
    }
  EXPECT_EQ(store.commit(contents_of(3, users)).path(), run / "checkpoint_000001") << "it goes on when there is room";
}

}  // namespace
}  // namespace muster
