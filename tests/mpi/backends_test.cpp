// The store over MPI, and torch's own backends over it.
#include "comm/agreement.hpp"
#include "group/mpi_store.hpp"
#include "group_tensors.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

namespace muster::backends_test {
namespace {

using namespace std::chrono_literals;
using namespace test;
using detail::group::Bytes;
using Tensors = std::vector<at::Tensor>;

c10::intrusive_ptr<c10d::Store> make_store(std::chrono::milliseconds timeout = 30s) {
  return c10::make_intrusive<detail::group::MpiStore>(world().duplicate(), timeout);
}

TEST(Store, GivesWhatAnotherRankSetsLater) {
  const auto store = make_store();
  const auto next = std::to_string((rank() + 1) % size());
  store->set("from " + std::to_string(rank()), "value " + std::to_string(rank()));
  EXPECT_EQ(store->get_to_str("from " + next), "value " + next);
  // NCCL asks for many keys at once.
  const auto both = store->multiGet({"from 0", "from " + next});
  EXPECT_EQ(std::string(both.at(1).begin(), both.at(1).end()), "value " + next);
  // Each rank waits for the one before it, so the last key comes late.
  if (rank() > 0) store->wait({"chain " + std::to_string(rank() - 1)});
  store->set("chain " + std::to_string(rank()), "");
  store->wait({"chain " + std::to_string(size() - 1)});
  EXPECT_TRUE(store->check({"chain 0", "from 0"}));
  EXPECT_FALSE(store->check({"chain 0", "nobody"}));
  EXPECT_EQ(store->getNumKeys(), 2 * size());
  world().barrier();
}

TEST(Store, CountsOverAllRanks) {
  const auto store = make_store();
  std::string mine;
  for (int i = 0; i < 10; ++i) mine += std::to_string(store->add("n", 1)) + " ";
  std::multiset<int> seen;
  for (const auto& theirs : world().all_gather(mine)) {
    std::istringstream numbers(theirs);
    for (int number = 0; numbers >> number;) seen.insert(number);
  }
  std::multiset<int> want;
  for (int i = 1; i <= 10 * size(); ++i) want.insert(i);
  EXPECT_EQ(seen, want) << "no two hear the same number";
  const auto winner = store->compareSet("first", "", std::to_string(rank()));
  EXPECT_EQ(winner, store->get_to_str("first"));
  world().barrier();
  if (rank() == size() - 1) {
    EXPECT_TRUE(store->deleteKey("n"));
  }
  world().barrier();
  EXPECT_FALSE(store->check({"n"}));
  world().barrier();
}

TEST(Store, CarriesLargeValues) {
  const auto store = make_store();
  const Bytes large(3'000'000, static_cast<std::uint8_t>(rank() + 1));
  store->set(std::to_string(rank()), large);
  const int next = (rank() + 1) % size();
  EXPECT_EQ(store->get(std::to_string(next)), Bytes(3'000'000, static_cast<std::uint8_t>(next + 1)));
  world().barrier();
}

TEST(Store, AnswersWhileRankZeroIsBusy) {
  const auto store = make_store();
  const auto folder = shared_folder();
  store->set("key " + std::to_string(rank()), "");
  if (rank() > 0) {
    for (int r = 0; r < size(); ++r) store->get("key " + std::to_string(r));
    std::ofstream(folder / std::to_string(rank()));
  } else {
    // It makes no MPI call until the others have their answers.
    for (int r = 1; r < size(); ++r)
      while (!std::filesystem::exists(folder / std::to_string(r))) std::this_thread::yield();
  }
  world().barrier();
  EXPECT_EQ(store->getNumKeys(), size());
  world().barrier();
}

TEST(Store, IsAskedBySeveralThreads) {
  const auto store = make_store();
  const auto clone = store->clone();
  std::string heard;
  std::thread waiting([&] { heard = store->get_to_str("late"); });
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(clone->check({"never"}));
  world().barrier();
  if (rank() == 0) clone->set("late", "here");
  waiting.join();
  EXPECT_EQ(heard, "here");
  world().barrier();
}

TEST(Store, GivesUpAfterItsTimeout) {
  const auto store = make_store(40ms);
  for (const bool waits : {false, true}) try {
      waits ? store->wait({"nobody"}, 30ms) : static_cast<void>(store->get("nobody"));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::retry);
      EXPECT_NE(std::string(error.what()).find("nobody"), std::string::npos);
    }
  store->set("a", "still there");
  EXPECT_EQ(store->get_to_str("a"), "still there");
  world().barrier();
}

TEST(Store, AWaitHearsOfAnotherRanksFailure) {
  const auto store = make_store();
  detail::comm::Outcome mine;
  if (rank() == size() - 1) {
    mine = {detail::comm::Outcome::Kind::failed, ExitCode::user_error, false, "it broke"};
  } else {
    EXPECT_THROW(store->get("what the last rank would give"), RemoteError);
    mine.kind = detail::comm::Outcome::Kind::interrupted;
  }
  detail::comm::raise_alarm(world(), mine);
  detail::comm::agree(world(), mine, 30s);
}

int threads() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) ++count;
  return count;
}

TEST(Store, LeavesNoThread) {
  const int before = threads();
  {
    const auto store = make_store();
    if (rank() == 0) {
      EXPECT_EQ(threads(), before + 1);
    }
    EXPECT_GE(store->clone()->add("n", 1), 1);
    world().barrier();
  }
  // A joined thread is still listed for a moment.
  while (threads() > before) std::this_thread::yield();
}

/// The local addresses of the sockets on which this process listens, as in /proc.
std::multiset<std::string> listening() {
  std::set<std::string> mine;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    mine.insert(std::filesystem::read_symlink(entry.path(), ignored).string());
  }
  std::multiset<std::string> addresses;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
      if (state == "0A" && mine.contains("socket:[" + inode + "]")) addresses.insert(local);
    }
  }
  return addresses;
}

class Gloo : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_backend("gloo")) GTEST_SKIP() << "this build has no gloo: its headers were not there";
    group = make_process_group(world(), {.backend = "gloo", .timeout = 30s});
  }
  void TearDown() override { world().barrier(); }
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

TEST_F(Gloo, IsTorchs) {
  EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getBackendName(), "gloo");
  EXPECT_EQ(group->getBackendType(), c10d::ProcessGroup::BackendType::GLOO);
  EXPECT_EQ(group->getRank(), rank());
  EXPECT_EQ(group->getSize(), size());
}

TEST_F(Gloo, MovesTensors) {
  for (const auto type : {at::kFloat, at::kDouble, at::kLong}) {
    Tensors summed{values(rank(), 1000, type)};
    group->allreduce(summed)->wait();
    auto want = values(0, 1000, type);
    for (int r = 1; r < size(); ++r) want += values(r, 1000, type);
    EXPECT_TRUE(at::equal(summed[0], want)) << c10::toString(type);

    const int root = size() - 1;
    Tensors sent{values(rank(), 77, type)};
    c10d::BroadcastOptions from;
    from.rootRank = root;
    group->broadcast(sent, from)->wait();
    EXPECT_TRUE(at::equal(sent[0], values(root, 77, type)));

    Tensors in{values(rank(), 9, type)};
    std::vector<Tensors> out(1);
    for (int r = 0; r < size(); ++r) out[0].push_back(at::zeros({9}, type));
    group->allgather(out, in)->wait();
    for (int r = 0; r < size(); ++r) EXPECT_TRUE(at::equal(out[0][static_cast<std::size_t>(r)], values(r, 9, type)));
  }
}

TEST_F(Gloo, ListensOnLoopbackAloneOnOneNode) {
  if (world().topology().num_nodes > 1) GTEST_SKIP() << "the ranks are on several nodes";
  const auto before = listening();  // of MPI, and of the group of this test
  const auto another = make_process_group(world(), {.backend = "gloo"});
  const auto with = listening();
  group.reset();
  const auto after = listening();
  std::multiset<std::string> opened, kept;
  std::set_difference(with.begin(), with.end(), before.begin(), before.end(), std::inserter(opened, opened.end()));
  EXPECT_EQ(opened.size(), 1U) << "one socket for each group";
  for (const auto& address : opened) EXPECT_TRUE(address.starts_with("0100007F:")) << address;
  EXPECT_EQ(after.size() + 1, with.size()) << "closed with its group";
}

TEST_F(Gloo, MayBeOfSomeRanks) {
  const auto part = world().split(rank() % 2);
  const auto half = make_process_group(part, {.backend = "cpu:gloo"});
  Tensors tensors{at::ones({4})};
  half->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0][3].item<float>(), part.size());
}

TEST(Backends, WhatThisBuildLacksIsRefusedWithTheRemedy) {
  for (const auto& [name, remedy] : std::map<std::string, std::string>{{"gloo", "libgloo-dev"}, {"nccl", "Torch_DIR"}})
    if (!has_backend(name)) try {
        make_process_group(world(), {.backend = name});
        ADD_FAILURE() << name;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::usage);
        EXPECT_NE(std::string(error.what()).find(remedy), std::string::npos) << error.what();
      }
  EXPECT_THROW(make_process_group(world(), {.backend = "smoke"}), Error);
}

TEST(Backends, NcclWithoutAGpuIsRefused) {
  if (!has_backend("nccl") || at::detail::getCUDAHooks().deviceCount() > 0)
    GTEST_SKIP() << "this build has no NCCL, or there is a GPU";
  for (const char* backend : {"nccl", "cpu:gloo,cuda:nccl"}) try {
      if (std::string(backend) != "nccl" && !has_backend("gloo")) continue;
      make_process_group(world(), {.backend = backend});
      ADD_FAILURE() << backend;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_NE(std::string(error.what()).find("GPU"), std::string::npos) << error.what();
    }
}

}  // namespace
}  // namespace muster::backends_test
