#include "base/file.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/store.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "state/collect.hpp"
#include "storage/folder_tier.hpp"
#include "support/io_errors.hpp"
#include "support/world.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint::checkpoint_test {

using comm::run_on_all;
using comm::run_on_root;
namespace {

namespace fs = std::filesystem;
using test::world;

/// The same on every rank; several pieces long.
StateDict state_of(int value) {
  return {.tensors = {{"model/w", at::arange(60'000, at::kDouble).add(value)},
                      {"model/b.bias", at::full({3}, value, at::kFloat)},
                      {"optimizer/model/w/step", at::full({}, value, at::kLong)}},
          .values = {{"model", Json::object()}, {"best", value}}};
}

CheckpointContents contents_of(int value) {
  return {.state = state_of(value),
          .random_state = "rank " + std::to_string(world().rank()),
          .position_json = {{"training_iteration", value}, {"epoch", value}},
          .metrics = {{"accuracy", value % 3}}};
}

void expect_state(const StateDict& state, int value) {
  const auto expected = state_of(value);
  ASSERT_EQ(state.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) EXPECT_TRUE(at::equal(state.tensors.at(name), tensor)) << name;
  EXPECT_EQ(state.values, expected.values);
}

/// The names in the run's directory on rank 0.
std::set<std::string> names_in(const fs::path& run) {
  const auto text = run_on_root(world(), [&] {
    auto names = Json::array();
    for (const auto& entry : fs::directory_iterator(run)) names.push_back(entry.path().filename().string());
    return names.dump();
  });
  return Json::parse(text).get<std::set<std::string>>();
}

void flip_a_byte(const fs::path& file, std::uint64_t at) {
  run_on_root(world(), [&] {
    File out(file, File::Mode::write);
    std::byte byte{};
    out.read_at({&byte, 1}, at);
    byte ^= std::byte{4};
    out.write_at({&byte, 1}, at);
    return std::string();
  });
}

/// The error of a collective call; the same on all ranks.
std::string error_of(const std::function<void()>& call, ExitCode code) {
  std::string what = "no error";
  try {
    call();
  } catch (const Error& error) {
    what = error.what();
    EXPECT_EQ(error.code(), code) << what;
  }
  for (const auto& other : world().all_gather(what)) EXPECT_EQ(other, what);
  return what;
}

TEST(Store, GivesBackWhatWasCommitted) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  EXPECT_FALSE(store.newest());
  EXPECT_EQ(store.commit(contents_of(1)).path(), run / "checkpoint_000000");
  EXPECT_EQ(store.commit(contents_of(2)).path(), run / "checkpoint_000001");
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000000", "checkpoint_000001"}));

  CheckpointStore again(world(), run, {});
  const auto newest = again.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000001");
  const auto restored = again.read(*newest);
  expect_state(restored.state, 2);
  EXPECT_EQ(restored.random_state, "rank " + std::to_string(world().rank()));
  EXPECT_EQ(restored.position_json.at("epoch"), 2);
  EXPECT_EQ(restored.metrics.at("accuracy"), 2);
  EXPECT_EQ(restored.world_size, world().size());
  expect_state(newest->to_dict(), 2);
  EXPECT_EQ(verify_checkpoint(newest->path()).problem, "");

  const auto list = list_checkpoints(run);
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].training_iteration, 1);
  EXPECT_EQ(list[1].index, 1);
  EXPECT_EQ(list[1].world_size, world().size());
}

TEST(Store, TheDirectoryHasTheModeOfTheUmask) {
  const auto run = test::shared_folder();
  const auto before = ::umask(027);
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(contents_of(1));
  ::umask(before);
  struct stat status {};
  ASSERT_EQ(::stat(checkpoint.path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0750u);
}

TEST(Store, AnotherWorldSizeReadsTheSame) {
  const auto run = test::shared_folder();
  CheckpointStore(world(), run, {}).commit(contents_of(3));
  const auto alone = world().split(world().rank(), 0);
  CheckpointStore store(alone, run, {});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  const auto restored = store.read(*newest);
  expect_state(restored.state, 3);
  EXPECT_EQ(restored.world_size, world().size());
  EXPECT_EQ(restored.random_state.has_value(), world().size() == 1);
}

TEST(Store, AnyNumberOfRanksReadsWhatTwoHaveSaved) {
  if (world().size() < 2) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  auto contents = contents_of(3);
  contents.state.tensors["large"] = at::arange(3'000'000, at::kDouble);
  const bool saves = world().rank() < 2;
  const auto pair = world().split(saves ? 0 : 1, world().rank());
  if (saves) CheckpointStore(pair, run, {}).commit(contents);
  world().barrier();
  for (int ranks = 1; ranks <= world().size(); ++ranks) {
    const auto some = world().split(world().rank() < ranks ? 0 : 1, world().rank());
    if (world().rank() < ranks) {
      CheckpointStore store(some, run, {});
      auto restored = store.read(*store.newest());
      EXPECT_TRUE(at::equal(restored.state.tensors.extract("large").mapped(), contents.state.tensors.at("large")));
      expect_state(restored.state, 3);
      EXPECT_EQ(restored.world_size, 2);
    }
    world().barrier();
  }
}

/// The bytes that were read from the disk for this process.
std::int64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  for (std::int64_t bytes = 0; io >> name >> bytes;)
    if (name == "read_bytes:") return bytes;
  return 0;
}

TEST(Store, ANodeReadsEachByteOnce) {
  const auto run = test::shared_folder();
  auto contents = contents_of(3);
  contents.state.tensors["large"] = at::arange(3'000'000, at::kDouble);
  const auto checkpoint = CheckpointStore(world(), run, {}).commit(contents);
  run_on_root(world(), [&] {
    const File file(checkpoint.path() / "state.h5", File::Mode::read);
    ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
    return std::string();
  });
  CheckpointStore store(world(), run, {});
  const auto before = bytes_read();
  const auto restored = store.read(*store.newest());
  EXPECT_TRUE(at::equal(restored.state.tensors.at("large"), contents.state.tensors.at("large")));
  EXPECT_LT(world().all_reduce(bytes_read() - before), 28'000'000) << "of a file of 25";
}

/// A state in which each rank has its own values.
CheckpointContents own_contents(int value) {
  const int rank = world().rank();
  auto contents = contents_of(value);
  contents.state.tensors["seen"] = at::full({2, 3}, 10 * value + rank, at::kFloat);
  contents.state.tensors["mark"] = at::full({}, rank, at::kLong);
  contents.state.values["seen"] = contents.state.values["mark"] = Json::object();
  contents.state.values["where"] = {{"rank", rank}};
  contents.replication = {{"seen", state::Replication::per_rank},
                          {"mark", state::Replication::per_rank},
                          {"where", state::Replication::per_rank}};
  return contents;
}

TEST(Store, LargeRowsAreWrittenByWhoHasThem) {
  const auto run = test::shared_folder();
  const int rank = world().rank(), ranks = world().size();
  auto contents = own_contents(4);
  const auto rows = [&](int of) { return at::arange(1'500'001, at::kDouble).add(of); };
  contents.state.tensors["rows"] = rows(rank);
  contents.state.tensors["other"] = at::full({333'333}, rank, at::kInt);
  contents.state.tensors["model/drifting"] = at::full({100'000}, rank, at::kFloat);
  contents.state.values["rows"] = contents.state.values["other"] = Json::object();
  contents.replication["rows"] = contents.replication["other"] = state::Replication::per_rank;
  contents.replication["model"] = state::Replication::averaged;
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(contents);
  EXPECT_EQ(verify_checkpoint(checkpoint.path()).problem, "");
  const auto state = checkpoint.to_dict();
  for (int r = 0; r < ranks; ++r) {
    EXPECT_TRUE(at::equal(state.tensors.at("rows").select(0, r), rows(r))) << r;
    EXPECT_TRUE(state.tensors.at("other").select(0, r).eq(r).all().item<bool>()) << r;
  }
  EXPECT_TRUE(state.tensors.at("model/drifting").eq(0).all().item<bool>());
}

TEST(Store, EmptyStateAndNoRandomState) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const auto restored = store.read(store.commit({}));
  EXPECT_TRUE(restored.state.tensors.empty());
  EXPECT_FALSE(restored.random_state);
}

TEST(Store, EachRankGetsItsOwnBack) {
  const auto run = test::shared_folder();
  const int rank = world().rank(), ranks = world().size();
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(own_contents(4));
  EXPECT_EQ(verify_checkpoint(checkpoint.path()).problem, "");
  const auto all = checkpoint.to_dict();
  for (int r = 0; r < ranks; ++r) {
    EXPECT_TRUE(all.tensors.at("seen").select(0, r).eq(40 + r).all().item<bool>()) << r;
    EXPECT_EQ(all.values.at("where").at(static_cast<std::size_t>(r)).at("rank"), r);
  }
  EXPECT_EQ(all.tensors.at("seen").sizes().vec(), (std::vector<std::int64_t>{ranks, 2, 3}));
  EXPECT_EQ(all.tensors.at("mark").sizes().vec(), (std::vector<std::int64_t>{ranks}));
  EXPECT_EQ(all.values.at("best"), 4) << "of all";

  auto seen = at::zeros({2, 3});
  auto mark = at::zeros({}, at::kLong);
  Json where;
  for (const auto& handle : {checkpoint, *store.newest()}) {
    handle.load("seen", per_rank(seen.zero_()));
    EXPECT_TRUE(seen.eq(40 + rank).all().item<bool>());
  }
  const auto saved = store.read(checkpoint).state;
  state::restore({{"mark", per_rank(mark)}}, state::select_entry(saved, "mark"), {rank, ranks});
  state::restore({{"where", per_rank(where)}}, state::select_entry(saved, "where"), {rank, ranks});
  EXPECT_EQ(mark.item<std::int64_t>(), rank);
  EXPECT_EQ(where.at("rank"), rank);

  // Another number of ranks is refused and changes nothing.
  seen.fill_(-1);
  const auto alone = world().split(rank, 0);
  CheckpointStore other(alone, run, {});
  if (ranks > 1) {
    EXPECT_THROW(other.newest()->load("seen", per_rank(seen)), Error);
    EXPECT_TRUE(seen.eq(-1).all().item<bool>());
  }
}

TEST(Store, WhatIsEachRanksOwnHasOneShape) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const bool last = world().rank() == world().size() - 1;
  auto contents = own_contents(1);
  if (last) contents.state.tensors["seen"] = at::zeros({5, 3});
  auto what = error_of([&] { store.commit(contents); }, ExitCode::user_error);
  EXPECT_NE(what.find("saving seen: it is Float [2, 3] on rank 0 and Float [5, 3] on rank"), std::string::npos) << what;
  contents = own_contents(1);
  if (last) contents.state.tensors.erase("mark");
  what = error_of([&] { store.commit(contents); }, ExitCode::user_error);
  EXPECT_NE(what.find("saving mark"), std::string::npos) << what;
  contents = own_contents(1);
  if (last) contents.replication.erase("where");
  what = error_of([&] { store.commit(contents); }, ExitCode::user_error);
  EXPECT_NE(what.find("saving where"), std::string::npos) << what;
  EXPECT_TRUE(names_in(run).empty());
  store.commit(own_contents(2));
}

TEST(Store, EntriesHaveTheSameNamesOnEveryRank) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const auto refused = [&](state::Replication replication) {
    CheckpointContents contents;
    const std::string name = world().rank() == 0 ? "a" : "b";
    contents.state = {.tensors = {{name + "/w", at::zeros({2})}}, .values = {{name, Json::object()}}};
    contents.replication = {{name, replication}};
    return error_of([&] { store.commit(contents); }, ExitCode::user_error);
  };
  for (const auto replication : {state::Replication::equal, state::Replication::per_rank})
    EXPECT_EQ(refused(replication),
              "saving a: rank 1 has no such entry in its state, and rank 0 has one. Give entries of the same names on "
              "every rank");
  EXPECT_TRUE(names_in(run).empty());
}

TEST(Store, WhatIsTheUsersOwnAndDiffersIsNotWritten) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1));
  const int last = world().size() - 1;
  const auto refused = [&](const std::function<void(CheckpointContents&)>& change, const std::string& named) {
    auto contents = contents_of(2);
    if (world().rank() == last) change(contents);
    const auto what = error_of([&] { store.commit(contents); }, ExitCode::user_error);
    for (const auto& part : {named, "rank " + std::to_string(last) + " has other values", std::string("per_rank")})
      EXPECT_NE(what.find(part), std::string::npos) << what;
    EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
  };
  refused([](CheckpointContents& c) { c.state.tensors["model/w"][59'999].add_(1e-9); }, "saving model/w:");
  refused([](CheckpointContents& c) { c.state.tensors["optimizer/model/w/step"].add_(1); },
          "saving optimizer/model/w/step:");
  refused([](CheckpointContents& c) { c.state.values["best"] = 2.0; }, "saving best (2 on rank 0, 2.0 on rank");
  refused(
      [](CheckpointContents& c) {
        c.state.values["model"] = {{"deep", {1, 2}}};
      },
      "saving model/deep (nothing on rank 0");
  if (last >= 2) {
    auto contents = contents_of(2);
    if (world().rank() > 0) contents.state.tensors["model/b.bias"].fill_(world().rank());
    const auto what = error_of([&] { store.commit(contents); }, ExitCode::user_error);
    // Rank 2 happens to have the same as rank 0.
    EXPECT_NE(what.find(last == 2 ? "rank 1 has other values" : "ranks 1, 3 have other values"), std::string::npos)
        << what;
  }
  expect_state(store.read(*store.newest()).state, 1);
  EXPECT_EQ(store.commit(contents_of(5)).path(), run / "checkpoint_000001") << "and it goes on";
}

TEST(Store, WhatHasDriftedIsRank0sWhole) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  auto contents = contents_of(3);
  contents.replication = {{"model", state::Replication::averaged}, {"optimizer", state::Replication::averaged}};
  contents.state.tensors["large"] = at::arange(100'000, at::kDouble);  // it is shared out as ever
  if (world().rank() != 0) {
    contents.state.tensors["model/w"].add_(world().rank());
    contents.state.tensors["optimizer/model/w/step"].add_(world().rank());
  }
  const auto checkpoint = store.commit(contents);
  auto state = checkpoint.to_dict();
  EXPECT_TRUE(at::equal(state.tensors.at("large"), contents.state.tensors.at("large")));
  state.tensors.erase("large");
  expect_state(state, 3);
  EXPECT_EQ(verify_checkpoint(checkpoint.path()).problem, "");
}

TEST(Store, UnitesTheUsersFiles) {
  const auto run = test::shared_folder(), user = test::shared_folder();
  const int rank = world().rank();
  const auto mine = user / std::to_string(rank);
  fs::create_directories(mine / "deep");
  std::ofstream(mine / ("rank_" + std::to_string(rank))) << std::string(100'000, static_cast<char>('a' + rank));
  std::ofstream(mine / "deep/common") << "of rank " << rank;
  auto contents = contents_of(1);
  contents.directory = mine;
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(contents);
  world().barrier();
  for (int r = 0; r < world().size(); ++r)
    EXPECT_EQ(read_file(checkpoint.path() / ("rank_" + std::to_string(r))),
              std::string(100'000, static_cast<char>('a' + r)));
  EXPECT_EQ(read_file(checkpoint.path() / "deep/common"), "of rank 0");
  EXPECT_EQ(verify_checkpoint(checkpoint.path()).problem, "");
  EXPECT_EQ(read_manifest(checkpoint.path()).files.size(), static_cast<std::size_t>(world().size()) + 2);
  world().barrier();

  flip_a_byte(checkpoint.path() / "deep/common", 3);
  EXPECT_NE(verify_checkpoint(checkpoint.path()).problem.find("deep/common"), std::string::npos);
}

TEST(Store, OneRanksFailureIsEverybodysAndLeavesTheOldOne) {
  const auto run = test::shared_folder(), user = test::shared_folder();
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1));
  const int last = world().size() - 1;
  const auto failing = [&](const std::function<void(CheckpointContents&)>& spoil, ExitCode code, const char* fact) {
    auto contents = contents_of(2);
    if (world().rank() == last) spoil(contents);
    const auto what = error_of([&] { store.commit(contents); }, code);
    const bool named = what.find("rank " + std::to_string(last) + " (") != std::string::npos;
    EXPECT_EQ(named, world().size() > 1) << what;
    EXPECT_NE(what.find(fact), std::string::npos) << what;
    EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
  };
  failing([&](CheckpointContents& c) { c.directory = user / "vanished"; }, ExitCode::data, "vanished");
  failing(
      [&](CheckpointContents& c) {
        c.directory = user / "linked";
        fs::create_directories(*c.directory);
        fs::create_symlink("/etc/hostname", *c.directory / "link");
      },
      ExitCode::data, "symbolic link");
  failing(
      [&](CheckpointContents& c) {
        c.directory = user / "ours";
        fs::create_directories(*c.directory);
        std::ofstream(*c.directory / "state.h5") << "mine";
      },
      ExitCode::usage, "a name that muster uses");
  if (world().size() > 1) {
    failing([](CheckpointContents& c) { c.state.tensors.erase("model/w"); }, ExitCode::usage, "saving model/w");
    failing([](CheckpointContents& c) { c.state.tensors["model/b.bias"] = at::full({4}, 1.0); }, ExitCode::usage,
            "model/b.bias");
  }
  EXPECT_EQ(store.commit(contents_of(5)).path(), run / "checkpoint_000001") << "and it goes on";
  expect_state(store.read(*store.newest()).state, 5);
}

/// While it lives this process cannot write past that byte of any file: the nearest thing to a full disk that needs no
/// rights.
class SmallFiles {
 public:
  explicit SmallFiles(rlim_t bytes) : handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~SmallFiles() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST(Store, ADiskThatTakesNoMoreOnOneRankIsEverybodysError) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {.num_to_keep = 1});
  store.commit(contents_of(1));
  auto large = contents_of(2);  // every rank writes some of it
  large.state.tensors["large"] = at::full({5'000'000}, 2.0, at::kDouble);
  for (const int bad : {0, world().size() - 1})
    for (const rlim_t bytes : {2000, 45'000'000}) {
      std::optional<SmallFiles> limit;
      if (world().rank() == bad) limit.emplace(bytes - (bytes > 2000 ? 10'000'000 : 0));
      error_of([&] { store.commit(large); }, ExitCode::retry);
      EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
    }
  expect_state(store.read(*store.newest()).state, 1);
  store.commit(contents_of(3));
  EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000001"});
}

TEST(Store, ADiskThatTakesTheValuesButNotTheStructureIsAnErrorToo) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {.num_to_keep = 1});
  store.commit(contents_of(1));
  CheckpointContents few;  // HDF5's own bytes around these go past the limit, wherever HDF5 writes them
  for (int i = 0; i < 20; ++i) few.state.tensors["t" + std::to_string(i)] = at::full({2}, i, at::kFloat);
  for (const rlim_t bytes : {200, 1000, 5000}) {
    std::optional<SmallFiles> limit;
    if (world().rank() == 0) limit.emplace(bytes);
    error_of([&] { store.commit(few); }, ExitCode::retry);
    EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
  }
  store.commit(few);
  EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000001"});
}

TEST(Store, RandomStatesMustBeOfOneLength) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  auto contents = contents_of(1);
  contents.random_state.resize(static_cast<std::size_t>(world().rank()));
  const auto what = error_of([&] { store.commit(contents); }, ExitCode::usage);
  EXPECT_NE(what.find("not as long on every rank"), std::string::npos) << what;
  EXPECT_TRUE(names_in(run).empty());
}

TEST(Store, KeepsTheNewestOrTheBest) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {.num_to_keep = 2});
  for (int value = 0; value < 4; ++value) store.commit(contents_of(value));
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000002", "checkpoint_000003"}));

  const auto other = test::shared_folder();
  CheckpointStore best(world(), other, {.num_to_keep = 1, .checkpoint_score_attribute = "accuracy"});
  for (int value = 0; value < 4; ++value) best.commit(contents_of(value));
  EXPECT_EQ(names_in(other), (std::set<std::string>{"checkpoint_000002", "checkpoint_000003"}));
  EXPECT_THROW(CheckpointStore(world(), other, {.num_to_keep = 0}), Error);
}

TEST(Store, WalksBackOverDamage) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    for (int value = 0; value < 4; ++value) store.commit(contents_of(value));
  }
  flip_a_byte(run / "checkpoint_000003/state.h5", 400'000);
  run_on_root(world(), [&] { return fs::remove(run / "checkpoint_000002/manifest.json"), std::string(); });
  CheckpointStore store(world(), run, {});
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  expect_state(store.read(*newest).state, 1);
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000000", "checkpoint_000001", "checkpoint_000002.damaged",
                                                  "checkpoint_000003.damaged"}));
  EXPECT_EQ(store.commit(contents_of(9)).path(), run / "checkpoint_000004") << "indices never go back";
}

TEST(Store, ACopyUnderAnotherNameIsPassedOver) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    for (int value = 0; value < 3; ++value) store.commit(contents_of(value));
  }
  run_on_root(world(), [&] {
    fs::copy(run / "checkpoint_000001", run / "checkpoint_20261125", fs::copy_options::recursive);
    fs::copy(run / "checkpoint_000002", run / "checkpoint_000004", fs::copy_options::recursive);
  });
  {
    CheckpointStore store(world(), run, {.num_to_keep = 2});
    const auto newest = store.newest();
    ASSERT_TRUE(newest);
    EXPECT_EQ(newest->path(), run / "checkpoint_000002");
    EXPECT_EQ(store.commit(contents_of(3)).path(), run / "checkpoint_000003");
    EXPECT_EQ(store.commit(contents_of(5)).path(), run / "checkpoint_000005") << "the name of 4 is taken";
    const auto what = error_of([&] { store.roll_back(4); }, ExitCode::data);
    EXPECT_NE(what.find("it is a copy of the checkpoint 2"), std::string::npos) << what;
  }
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000003", "checkpoint_000004", "checkpoint_000005",
                                                  "checkpoint_20261125"}));
  const auto newest = CheckpointStore(world(), run, {}).newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000005");
  EXPECT_NE(list_checkpoints(run).back().problem.find("a copy of the checkpoint 1"), std::string::npos);
}

TEST(Store, AnAbsurdNumberInANameIsNotCountedOnFrom) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    store.commit(contents_of(0));
    store.commit(contents_of(1));
  }
  run_on_root(world(), [&] {
    fs::create_directory(run / "checkpoint_999999999");
    fs::create_directory(run / "checkpoint_000007.damaged");
  });
  for (int next = 8; next < 10; ++next) {
    CheckpointStore store(world(), run, {});
    ASSERT_TRUE(store.newest());
    EXPECT_EQ(store.commit(contents_of(next)).path(), run / ("checkpoint_00000" + std::to_string(next)));
  }
  run_on_root(world(), [&] { write_file(run / "steps_back.json", R"([{"to": 9, "over": 999999999}])"); });
  const auto what = error_of([&] { CheckpointStore(world(), run, {}); }, ExitCode::data);
  EXPECT_NE(what.find("the highest index is 999999999"), std::string::npos) << what;
}

TEST(Store, ANameMovesWhenItsCheckpointIsPruned) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {.num_to_keep = 1, .checkpoint_score_attribute = "accuracy"});
  const auto report = [&](int value, const std::string& name) {
    auto contents = contents_of(value);
    contents.metrics["checkpoint_name"] = name;
    const auto index = storage::Tier::index_of(store.commit(contents).path().filename());
    if (!name.empty()) run_on_root(world(), [&] { storage::FolderTier(run).set_name(*index, name); });
    world().barrier();
  };
  report(2, "best");  // the best score
  report(0, "best");
  report(1, "last");
  EXPECT_EQ(fs::read_symlink(run / "best"), "checkpoint_000000") << "the kept one that had the name, too";
  report(1, "");
  EXPECT_FALSE(fs::exists(fs::symlink_status(run / "last")));
  EXPECT_EQ(names_in(run), (std::set<std::string>{"best", "checkpoint_000000", "checkpoint_000003"}));
}

TEST(Store, WhatIsRolledBackLosesItsNames) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const storage::FolderTier tier(run);
  const std::pair<int, const char*> reports[] = {{1, "best"}, {2, ""}, {3, "best"}, {4, "last"}};
  for (const auto& [value, name] : reports) {
    auto contents = contents_of(value);
    contents.metrics["checkpoint_name"] = name;
    const auto index = storage::Tier::index_of(store.commit(contents).path().filename());
    if (*name != 0) run_on_root(world(), [&] { tier.set_name(*index, name); });
  }
  store.roll_back(1);
  EXPECT_EQ(fs::read_symlink(run / "best"), "checkpoint_000002") << "it may yet be refused";
  world().barrier();
  store.confirm_rollback();
  EXPECT_EQ(fs::read_symlink(run / "best"), "checkpoint_000000") << "the newest before it that had the name";
  EXPECT_FALSE(fs::exists(fs::symlink_status(run / "last")));
  world().barrier();
  // As if the job had been killed before.
  run_on_root(world(), [&] {
    fs::remove(run / "best");
    fs::create_symlink("checkpoint_000002", run / "best");
  });
  store.roll_back(1);
  EXPECT_EQ(fs::read_symlink(run / "best"), "checkpoint_000000");
}

TEST(Store, AfterARollbackThatLostItsCheckpointTheUserChooses) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    for (const int value : {1, 2, 3}) store.commit(contents_of(value));
    store.roll_back(0);
    store.confirm_rollback();
  }
  run_on_root(world(), [&] { fs::remove_all(run / "checkpoint_000000"); });
  CheckpointStore store(world(), run, {});
  const auto text = error_of([&] { store.newest(); }, ExitCode::data);
  EXPECT_NE(text.find("the checkpoint to which the run was rolled back is gone"), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("--resume " + (run / "checkpoint_000002").string())) << text;
}

TEST(Store, RanksThatGiveDifferentKindsOfCheckpointsAreRefused) {
  if (world().size() == 1) GTEST_SKIP() << "one rank cannot differ from another";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  auto given = store.commit(contents_of(1));
  run_on_root(world(), [&] {
    fs::create_directory(run / "files");
    write_file(run / "files/notes.txt", "the user's own");
  });
  if (world().rank() == 0) given = Checkpoint::from_directory(run / "files");
  std::string text = "no error";
  try {
    store.read(given);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    text = error.what();
  }
  EXPECT_NE(text.find("the ranks give different kinds of checkpoints"), std::string::npos) << text;
}

TEST(Store, APageThatCannotBeReadIsAnErrorAndNoSignal) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(contents_of(1)).path();
  const auto manifest = read_manifest(checkpoint);
  const auto mapped = MappedState::open(checkpoint, manifest.state_file());
  if (!mapped) GTEST_SKIP() << "this system maps no files";
  {
    // Whichever rank has verified it, it is not in memory any more.
    const test::IoError sick("madvise", "state.h5", EFAULT);
    EXPECT_THROW(mapped->tensors(manifest), Error);
  }
  EXPECT_EQ(mapped->tensors(manifest).size(), manifest.tensors.size());
}

TEST(Store, AnErrorOfReadingCondemnsNothing) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1));
  store.commit(contents_of(2));
  const struct {
    const char* call;
    const char* name;
    int error;
  } faults[] = {{"open", "1/manifest.json", EIO},  {"open", "1/manifest.json", EACCES}, {"open", "1/state.h5", ESTALE},
                {"open", "1/state.h5", EMFILE},    {"fstat", "1/manifest.json", EIO},   {"fstat", "1/state.h5", ESTALE},
                {"pread", "1/manifest.json", EIO}, {"madvise", "1/state.h5", EFAULT},   {"lstat", "1/state.h5", EIO},
                {"lstat", "1/manifest.json", EIO}};
  for (const auto& fault : faults)
    for (const int bad : {0, world().size() - 1}) {
      std::optional<test::IoError> sick;
      if (world().rank() == bad) sick.emplace(fault.call, fault.name, fault.error);
      const auto what = error_of([&] { store.newest(); }, ExitCode::retry);
      if (sick) {
        EXPECT_GT(sick->count(), 0) << fault.call << " " << fault.name;
      }
      EXPECT_NE(what.find(fault.name), std::string::npos) << what;
      sick.reset();
      EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000000", "checkpoint_000001"})) << what;
    }
  // The run's folder itself, which rank 0 lists.
  for (const auto& [call, name] : {std::pair("opendir", run.filename()), std::pair("lstat", fs::path("t_000001"))}) {
    std::optional<test::IoError> sick;
    if (world().rank() == 0) sick.emplace(call, name.string(), EIO);
    EXPECT_NE(error_of([&] { store.newest(); }, ExitCode::retry), "no error") << call;
  }
  const auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000001");
}

TEST(Store, TooManyOpenFilesCondemnNothing) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1));
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  if (world().rank() == world().size() - 1) {
    const rlimit none{0, before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  EXPECT_NE(error_of([&] { store.newest(); }, ExitCode::retry), "no error");
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
  EXPECT_TRUE(store.newest());
}

TEST(Store, WhatOnlySomeRanksMissCondemnsNothing) {
  if (world().size() == 1) GTEST_SKIP() << "needs another rank";
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  store.commit(contents_of(1));
  for (const char* name : {"manifest.json", "state.h5"}) {
    std::optional<test::IoError> blind;
    if (world().rank() == world().size() - 1) blind.emplace("open", name, ENOENT);
    const auto what = error_of([&] { store.newest(); }, ExitCode::retry);
    EXPECT_NE(what.find("rank " + std::to_string(world().size() - 1)), std::string::npos) << what;
    EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
  }
}

TEST(Store, WhatIsWholeAgainIsTakenBack) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    for (int value = 0; value < 4; ++value) store.commit(contents_of(value));
  }
  run_on_root(world(), [&] {
    for (const char* name : {"checkpoint_000002", "checkpoint_000003"})
      fs::rename(run / name, run / name += ".damaged");
    return std::string();
  });
  flip_a_byte(run / "checkpoint_000003.damaged/state.h5", 400'000);
  CheckpointStore store(world(), run, {});
  auto newest = store.newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000002");
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000000", "checkpoint_000001", "checkpoint_000002",
                                                  "checkpoint_000003.damaged"}));
  // Once a newer checkpoint was saved, it does not belong to the run's course any more.
  store.commit(contents_of(4));
  flip_a_byte(run / "checkpoint_000003.damaged/state.h5", 400'000);
  newest = CheckpointStore(world(), run, {}).newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000004");
}

TEST(Store, AllDamagedAreTakenBackWhenWhole) {
  const auto run = test::shared_folder();
  {
    CheckpointStore store(world(), run, {});
    store.commit(contents_of(1));
    store.commit(contents_of(2));
  }
  run_on_root(world(), [&] {
    for (const char* name : {"checkpoint_000000", "checkpoint_000001"})
      fs::rename(run / name, run / name += ".damaged");
    return std::string();
  });
  const auto newest = CheckpointStore(world(), run, {}).newest();
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->path(), run / "checkpoint_000001");
  EXPECT_EQ(names_in(run), (std::set<std::string>{"checkpoint_000000", "checkpoint_000001"}));
}

TEST(Store, AllDamagedIsRefusedAgainAndAgain) {
  const auto run = test::shared_folder();
  CheckpointStore(world(), run, {}).commit(contents_of(1));
  run_on_root(world(), [&] { return fs::resize_file(run / "checkpoint_000000/state.h5", 5000), std::string(); });
  for (int attempt = 0; attempt < 2; ++attempt) {
    CheckpointStore store(world(), run, {});
    const auto what = error_of([&] { store.newest(); }, ExitCode::data);
    EXPECT_NE(what.find("all that are there are damaged"), std::string::npos) << what;
    EXPECT_EQ(what.find("remove"), std::string::npos) << "nobody is told to destroy them: " << what;
  }
  EXPECT_EQ(CheckpointStore(world(), run, {}).commit(contents_of(2)).path(), run / "checkpoint_000001");
}

TEST(Store, ReadingDamageIsTheSameErrorOnAll) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  const auto checkpoint = store.commit(contents_of(1));
  flip_a_byte(checkpoint.path() / "state.h5", 400'000);
  const auto what = error_of([&] { store.read(checkpoint); }, ExitCode::data);
  EXPECT_NE(what.find("their checksum is wrong"), std::string::npos) << what;
}

TEST(Store, LeftoversGoAndCountForTheIndex) {
  const auto run = test::shared_folder();
  run_on_root(world(), [&] {
    fs::create_directories(run / ".checkpoint_000007.saving/sub");
    std::ofstream(run / ".checkpoint_000007.saving/sub/file") << "half";
    fs::create_directories(run / ".checkpoint_000003.pruning");
    fs::create_directories(run / ".checkpoint_of_mine");
    return std::string();
  });
  CheckpointStore store(world(), run, {});
  EXPECT_EQ(names_in(run), std::set<std::string>{".checkpoint_of_mine"});
  EXPECT_FALSE(store.newest());
  EXPECT_EQ(store.commit(contents_of(1)).path(), run / "checkpoint_000008");
}

TEST(Store, ANameInTheWayIsNotReplaced) {
  const auto run = test::shared_folder();
  CheckpointStore store(world(), run, {});
  run_on_root(world(), [&] { return std::ofstream(run / "checkpoint_000000") << "somebody's file", std::string(); });
  error_of([&] { store.commit(contents_of(1)); }, ExitCode::retry);
  EXPECT_EQ(names_in(run), std::set<std::string>{"checkpoint_000000"});
}

}  // namespace
}  // namespace muster::detail::checkpoint::checkpoint_test
