#include "base/claim.hpp"
#include "base/cpus.hpp"
#include "base/memory_limit.hpp"
#include "launch/binding.hpp"
#include "run/device.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::cores_test {
namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

void write_cpu(const fs::path& root, int cpu, int package, int core, const std::string& siblings) {
  const auto topology = root / "sys/devices/system/cpu" / ("cpu" + std::to_string(cpu)) / "topology";
  write(topology / "physical_package_id", std::to_string(package));
  write(topology / "core_id", std::to_string(core));
  write(topology / "thread_siblings_list", siblings + "\n");
}

std::vector<std::vector<int>> cpus_of(const std::vector<Core>& cores) {
  std::vector<std::vector<int>> cpus;
  for (const auto& core : cores) {
    EXPECT_LE(core.number, core.cpus.front());
    cpus.push_back(core.cpus);
  }
  return cpus;
}

// ---- claims

TEST(Claims, AreOfOneProcessAndEndWithIt) {
  const std::string name = "test/" + std::to_string(::getpid());
  EXPECT_FALSE(holder_of(name));
  {
    const Claim first(name), second(name);
    EXPECT_FALSE(first.other());
    EXPECT_EQ(second.other(), ::getpid());
    EXPECT_EQ(holder_of(name), ::getpid());
  }
  EXPECT_FALSE(holder_of(name));

  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const Claim claim(name);
    if (::write(ready[1], "1", 1) == 1) ::pause();
    ::_exit(0);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(Claim(name).other(), child);
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(Claim(name).other());
}

TEST(Claims, AreAnsweredHoweverOftenOneAsks) {
  const std::string name = "test/often/" + std::to_string(::getpid());
  const Claim claim(name);
  for (int i = 0; i < 10'000; ++i) ASSERT_TRUE(holder_of(name)) << i;
}

// ---- cores of a machine

TEST(Cores, AreReadWithTheirNeighboursTogether) {
  const test::Folder root;
  EXPECT_TRUE(cores_of_machine(root).empty());
  write(root / "sys/devices/system/cpu/online", "0-7\n");
  for (int cpu = 0; cpu < 8; ++cpu)  // packages alternate; the second CPUs of the cores come last
    write_cpu(root, cpu, cpu % 2, cpu % 4 / 2, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4));
  const auto cores = cores_of_machine(root);
  EXPECT_EQ(cpus_of(cores), (std::vector<std::vector<int>>{{0, 4}, {2, 6}, {1, 5}, {3, 7}}));
  EXPECT_EQ(cpus_of(cores_in("11000101", cores)), (std::vector<std::vector<int>>{{0}, {1, 5}, {7}}));
  EXPECT_EQ(cores_in("00000001", cores).front().number, 3);
  EXPECT_EQ(cpus_of(cores_in("0000000011", cores)), (std::vector<std::vector<int>>{{8}, {9}})) << "nothing is known";

  EXPECT_EQ(count_usable_cores("11111111", root), 4);
  EXPECT_EQ(count_usable_cores("10001000", root), 1);
  write(root / "proc/self/cgroup", "0::/job\n");
  for (const auto& [quota, cores_of_quota] :
       std::map<std::string, int>{{"max", 4}, {"800000", 4}, {"399999", 3}, {"250000", 2}, {"50000", 1}}) {
    write(root / "sys/fs/cgroup/job/cpu.max", quota + " 100000\n");
    EXPECT_EQ(count_usable_cores("11111111", root), cores_of_quota) << quota;
  }
}

TEST(MemoryLimit, IsTheSmallestOfTheMachineAndTheControlGroups) {
  const test::Folder root;
  EXPECT_EQ(memory_limit(root), HUGE_VAL);
  write(root / "proc/meminfo", "MemFree:  100 kB\nMemTotal:       8000 kB\nBuffers:  3 kB\n");
  EXPECT_EQ(memory_limit(root), 8000. * 1024);
  write(root / "proc/self/cgroup", "0::/job/step\n");
  write(root / "sys/fs/cgroup/job/step/memory.max", "max\n");
  EXPECT_EQ(memory_limit(root), 8000. * 1024);
  write(root / "sys/fs/cgroup/job/memory.max", "4096000\n");
  EXPECT_EQ(memory_limit(root), 4096000);
  write(root / "sys/fs/cgroup/job/step/memory.max", "2048000\n");
  EXPECT_EQ(memory_limit(root), 2048000);
  write(root / "proc/self/cgroup", "3:cpu:/x\n4:memory:/group\n");
  write(root / "sys/fs/cgroup/memory/group/memory.limit_in_bytes", "1000\n");
  EXPECT_EQ(memory_limit(root), 1000);
  write(root / "proc/self/cgroup", "4:memory,misc:/group\n");
  write(root / "sys/fs/cgroup/memory,misc/group/memory.limit_in_bytes", "900\n");
  EXPECT_EQ(memory_limit(root), 900) << "mounted by the names of all its controllers";
  write(root / "sys/fs/cgroup/memory,misc/group/memory.limit_in_bytes", "9223372036854771712\n");
  write(root / "sys/fs/cgroup/memory/group/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(memory_limit(root), 8000. * 1024);
  EXPECT_GT(memory_limit(), 1e6) << "of this machine";
}

TEST(Cores, MasksAndListsOfTheKernel) {
  EXPECT_EQ(parse_cpu_list("0-2,8,10-11"), (std::vector<int>{0, 1, 2, 8, 10, 11}));
  EXPECT_TRUE(parse_cpu_list("").empty());
  EXPECT_EQ(mask_of({3, 1}), "0101");
  EXPECT_EQ(mask_of({}), "");
  EXPECT_EQ(std::ranges::count(cpu_mask(), '1'), std::ranges::count(cpu_mask(::getpid()), '1'));
}

// ---- the shares of the ranks

using launch::share_out, launch::shared_with_others, launch::TakenCores;

TEST(Shares, AreWholeCoresOfTheMask) {
  const std::vector<Core> cores{{0, {0, 4}}, {1, {1, 5}}, {2, {2, 6}}, {3, {3, 7}}};
  const std::string all = "11111111";
  EXPECT_EQ(share_out(cores, {all, all}, {}), (std::vector<std::string>{"110011", "00110011"}));
  EXPECT_EQ(share_out(cores, {all}, {}), std::vector<std::string>{all});
  EXPECT_EQ(share_out(cores, {all, all}, {{1, 7}}), (std::vector<std::string>{"10001", "00110011"}));
  EXPECT_EQ(share_out(cores, {"1101", "1101"}, {}), (std::vector<std::string>{"1", "0101"})) << "two of three cores";
  // Two cores for each, or all of them for all.
  EXPECT_EQ(share_out(cores, {all, all}, {}, 2), (std::vector<std::string>{"110011", "00110011"}));
  EXPECT_EQ(share_out(cores, {all, all, all}, {}, 2), std::vector<std::string>(3, all));
  EXPECT_EQ(share_out(cores, {all, all}, {{0, 7}}, 2), std::vector<std::string>(2, "01110111"));
  const std::vector<std::string> many(5, all), bound{"1", "001"}, overlapping{"11", "011"};
  EXPECT_EQ(share_out(cores, many, {}), many);
  EXPECT_EQ(share_out(cores, bound, {}), bound);
  EXPECT_EQ(share_out(cores, overlapping, {}), overlapping);
  // A socket for two ranks each.
  EXPECT_EQ(share_out(cores, {"11", "0011", "11", "0011"}, {}), (std::vector<std::string>{"1", "001", "01", "0001"}));

  const TakenCores two{{0, 7}, {1, 7}}, three{{0, 7}, {1, 7}, {3, 9}};
  EXPECT_TRUE(shared_with_others(cores, {all, all}, two).empty()) << "two are free";
  EXPECT_EQ(shared_with_others(cores, {all, all}, three), three);
  EXPECT_EQ(share_out(cores, {all, all}, three), (std::vector<std::string>{all, all}));
  EXPECT_EQ(shared_with_others(cores, {"1", "001"}, two), (TakenCores{{0, 7}})) << "bound to a core that is taken";
}

/// Random machines, masks and claims, against what share_out() promises, read off CPU by CPU.
TEST(Shares, OfRandomMachines) {
  std::mt19937 random(1);
  const auto below = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  for (int round = 0; round < 5000; ++round) {
    const int core_count = 1 + below(12), threads = 1 + below(2);
    std::vector<int> numbers(static_cast<std::size_t>(core_count * threads));
    std::ranges::generate(numbers, [n = 0]() mutable { return n++; });
    std::ranges::shuffle(numbers, random);
    std::vector<Core> cores;
    for (int c = 0; c < core_count; ++c) {
      std::vector<int> cpus(numbers.begin() + c * threads, numbers.begin() + (c + 1) * threads);
      std::ranges::sort(cpus);
      cores.push_back({cpus.front(), cpus});
    }
    TakenCores taken;
    for (const auto& core : cores)
      if (below(4) == 0) taken[core.number] = 7;
    // One to three disjoint masks, each for some ranks.
    const int mask_count = 1 + below(3);
    std::vector<std::vector<int>> parts(static_cast<std::size_t>(mask_count));
    for (const int cpu : numbers)
      if (below(8) > 0) parts[static_cast<std::size_t>(below(mask_count))].push_back(cpu);
    std::erase_if(parts, [](const auto& part) { return part.empty(); });
    std::vector<std::string> masks;
    for (const auto& part : parts) masks.insert(masks.end(), static_cast<std::size_t>(1 + below(4)), mask_of(part));
    std::ranges::shuffle(masks, random);
    if (masks.empty()) continue;

    const auto shares = share_out(cores, masks, taken);
    ASSERT_EQ(shares.size(), masks.size());
    for (const auto& part : parts) {
      const auto mask = mask_of(part);
      std::vector<const Core*> free;  // in the order of the machine
      for (const auto& core : cores)
        if (!taken.contains(core.number) &&
            std::ranges::any_of(core.cpus, [&](int cpu) { return std::ranges::count(part, cpu) > 0; }))
          free.push_back(&core);
      const auto ranks = static_cast<std::size_t>(std::ranges::count(masks, mask));
      std::size_t next = 0;  // of `free`
      for (std::size_t r = 0; r < masks.size(); ++r) {
        if (masks[r] != mask) continue;
        if (free.size() < ranks) {
          ASSERT_EQ(shares[r], mask);
          continue;
        }
        std::vector<int> expected;
        std::size_t count = 0;
        for (; next < free.size(); ++next, ++count) {  // as long as the share has CPUs of the next core
          std::vector<int> cpus;
          for (const int cpu : free[next]->cpus)
            if (std::ranges::count(part, cpu) > 0) cpus.push_back(cpu);
          const auto place = static_cast<std::size_t>(cpus.front());
          if (place >= shares[r].size() || shares[r][place] != '1') break;
          expected.insert(expected.end(), cpus.begin(), cpus.end());
        }
        ASSERT_EQ(shares[r], mask_of(expected)) << "whole neighbouring cores and nothing else";
        ASSERT_GE(count, free.size() / ranks);
        ASSERT_LE(count, (free.size() + ranks - 1) / ranks);
      }
      ASSERT_EQ(next, free.size() < ranks ? 0 : free.size()) << "all are given out, or none";
    }
  }
}

// ---- GPUs

std::vector<std::size_t> gpus_of(int ranks, const std::vector<std::string>& gpus, const std::set<std::string>& taken) {
  std::vector<std::size_t> chosen;
  for (int rank = 0; rank < ranks; ++rank) chosen.push_back(run::choose_gpu(gpus, taken, rank));
  return chosen;
}

TEST(Gpus, AreThoseThatNoOtherLaunchHas) {
  const std::vector<std::string> gpus{"a", "b", "c", "d"};
  using Chosen = std::vector<std::size_t>;
  EXPECT_EQ(gpus_of(4, gpus, {}), (Chosen{0, 1, 2, 3}));
  EXPECT_EQ(gpus_of(6, gpus, {}), (Chosen{0, 1, 2, 3, 0, 1})) << "more ranks than GPUs";
  EXPECT_EQ(gpus_of(2, gpus, {"a", "b"}), (Chosen{2, 3}));
  EXPECT_EQ(gpus_of(3, gpus, {"a", "c"}), (Chosen{1, 3, 1}));
  EXPECT_EQ(gpus_of(3, gpus, {"a", "b", "c", "d"}), (Chosen{0, 1, 2})) << "none is free";
  EXPECT_EQ(gpus_of(2, {"a"}, {"b"}), (Chosen{0, 0}));
  // srun --gpus-per-task: each rank sees one.
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(run::choose_gpu({gpus[static_cast<std::size_t>(rank)]}, {}, rank), 0u);
}

TEST(Gpus, HaveTheirNamesInTheListOfVisibleOnes) {
  EXPECT_EQ(run::gpu_in_list(nullptr, 1), "1");
  EXPECT_EQ(run::gpu_in_list("", 1), "1");
  EXPECT_EQ(run::gpu_in_list("2,3", 1), "3");
  EXPECT_EQ(run::gpu_in_list("GPU-5f,MIG-7a", 1), "MIG-7a");
  EXPECT_EQ(run::gpu_in_list("2", 0), "2");
}

}  // namespace
}  // namespace muster::detail::cores_test
