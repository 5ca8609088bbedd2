// The checks of `muster doctor`, on facts that stand in for those of a machine.
#include "base/program.hpp"
#include "base/readable.hpp"
#include "doctor/checks.hpp"
#include "doctor/shared_storage.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::doctor::doctor_test {
namespace {

using enum Finding::Severity;
namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

/// Requires one finding of that severity which has these words in its fact or remedy.
void expect_one(const Findings& findings, Finding::Severity severity, const std::string& words) {
  ASSERT_EQ(findings.size(), 1u) << (findings.empty() ? "" : findings.front().fact + " | " + findings.back().fact);
  EXPECT_EQ(findings.front().severity, severity);
  const auto text = findings.front().fact + ". " + findings.front().remedy;
  EXPECT_NE(text.find(words), std::string::npos) << text;
  EXPECT_EQ(findings.front().remedy.empty(), severity == ok) << text;
}

Json with(Json facts, const Json& changes) {
  facts.update(changes);
  return facts;
}

Environment environment_of(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

// ---- programs

TEST(Program, GivesOutputExitCodeAndSignal) {
  const auto said = run_program({"sh", "-c", "echo out; echo err >&2; exit 3"}, std::chrono::seconds(20));
  EXPECT_EQ(said.kind, ProgramEnd::Kind::exited);
  EXPECT_EQ(said.code, 3);
  EXPECT_EQ(said.output, "out\n");
  EXPECT_EQ(run_program({"sh", "-c", "echo err >&2"}, std::chrono::seconds(20), true).output, "err\n");
  EXPECT_EQ(run_program({"sh", "-c", "kill -9 $$"}, std::chrono::seconds(20)).kind, ProgramEnd::Kind::killed_by_signal);
  EXPECT_EQ(run_program({"/no/such/program"}, std::chrono::seconds(20)).kind, ProgramEnd::Kind::not_started);
}

TEST(Program, IsKilledWithItsChildrenWhenItTakesTooLong) {
  const auto late = run_program({"sh", "-c", "echo begun; sleep 1000 & sleep 1000"}, std::chrono::milliseconds(200));
  EXPECT_EQ(late.kind, ProgramEnd::Kind::out_of_time);
  EXPECT_FALSE(late.succeeded());
  const auto silent = run_program({"sh", "-c", "exec >&-; sleep 1000"}, std::chrono::milliseconds(200));
  EXPECT_EQ(silent.kind, ProgramEnd::Kind::out_of_time) << "its output has ended, but it runs";
}

// ---- MPI

Json mpi(const std::string& version) {
  return {{"library", "Open MPI v4.1.4"}, {"mpirun", {{"path", "/bin/mpirun"}, {"version", version}}}, {"srun", false}};
}

TEST(Mpi, FindsTheLauncherOfTheSameMpi) {
  expect_one(check_mpi(mpi("mpirun (Open MPI) 4.1.4"), {}), ok, "mpirun is /bin/mpirun");
  expect_one(check_mpi(mpi("mpirun (Open MPI) 4.1.6"), {}), ok, "Open MPI v4.1.4");
  expect_one(check_mpi(mpi("mpirun (Open MPI) 5.0.3"), {}), warning, "is of version 5.0.3");
  expect_one(check_mpi(mpi("HYDRA build details:"), {}), to_mend, "is of MPICH");
  expect_one(check_mpi(mpi("Intel(R) MPI Library for Linux* OS, Version 2021.5"), {}), to_mend, "is of Intel MPI");
  expect_one(check_mpi(with(mpi(""), {{"mpirun", {{"path", "/bin/mpirun"}, {"version", nullptr}}}}), {}), may_pass,
             "gave no answer");
  expect_one(check_mpi(with(mpi(""), {{"mpirun", nullptr}}), {}), to_mend, "openmpi-bin");
  expect_one(check_mpi(with(mpi(""), {{"mpirun", nullptr}, {"srun", true}}), {}), warning, "srun --mpi=pmix");
  const Json mpich{{"library", "MPICH Version: 4.0.2"}, {"mpirun", nullptr}, {"srun", true}};
  expect_one(check_mpi(mpich, {}), warning, "there is no mpiexec.hydra in PATH");
  expect_one(check_mpi(mpich, {}), warning, "srun --mpi=pmi2");
  expect_one(
      check_mpi(with(mpich, {{"mpirun", {{"path", "/bin/mpiexec.hydra"}, {"version", "HYDRA build details:"}}}}), {}),
      ok, "mpirun is /bin/mpiexec.hydra");
}

TEST(Mpi, UnderALauncherDoesNotMindWhatIsInPath) {
  expect_one(check_mpi(with(mpi(""), {{"mpirun", nullptr}}), {.launcher = "srun", .ranks = 4}), ok, "started by srun");
  expect_one(check_mpi(mpi(""), {.launcher = "srun", .ranks = 4, .calls_from_threads = false}), warning,
             "MPI_THREAD_MULTIPLE");
}

TEST(Mpi, SaysThatItDoesNotStart) {
  const auto facts = mpi("mpirun (Open MPI) 4.1.4");
  expect_one(check_mpi(facts, {.problem = "it broke", .remedy = "Mend it"}), to_mend, "it broke. Mend it");
  expect_one(check_mpi(facts, {.problem = "it hangs", .remedy = "Wait", .may_pass = true}), may_pass, "it hangs");
}

TEST(Mpi, LooksForProgramsInPath) {
  const test::Folder folder;
  write(folder / "mpiexec", "");
  fs::permissions(folder / "mpiexec", fs::perms::owner_all);
  std::vector<std::string> ran;
  const auto facts = look_at_mpi("Open MPI v4.1.4", environment_of({{"PATH", "/none:" + folder.path().string()}}),
                                 [&](const std::vector<std::string>& words) {
                                   ran = words;
                                   return Json("mpirun (Open MPI) 4.1.4\n\nReport bugs\n");
                                 });
  EXPECT_EQ(ran, (std::vector<std::string>{folder.file("mpiexec"), "--version"}));
  EXPECT_EQ(facts.at("mpirun").at("version"), "mpirun (Open MPI) 4.1.4");
  EXPECT_EQ(facts.at("srun"), false);
}

// ---- network

TEST(Network, WantsANameAndAnInterface) {
  const Json facts{
      {"host", "n1"},
      {"resolves", true},
      {"interfaces", {{{"name", "eth0"}, {"address", "10.0.0.1"}}, {{"name", "eth0"}, {"address", "fe80::1"}}}}};
  expect_one(check_network(facts, 2), ok, "up: eth0 10.0.0.1");
  expect_one(check_network(with(facts, {{"resolves", false}}), 1), warning, "n1 has no address");
  expect_one(check_network(with(facts, {{"resolves", nullptr}}), 1), warning, "did not say within 5 s");
  expect_one(check_network(with(facts, {{"interfaces", Json::array()}}), 2), warning, "no interface is up");
  expect_one(check_network(with(facts, {{"interfaces", Json::array()}}), 1), ok, "only the loopback is up");
  EXPECT_FALSE(look_at_network().at("host").get<std::string>().empty());
}

// ---- libraries

const Json libraries{
    {"muster", "0.1.0"},        {"libtorch", "2.13.0"}, {"cuda", false},          {"gpus", 0},
    {"gpus_of_node", 0},        {"hdf5", "1.10.8"},     {"hdf5_built", "1.10.8"}, {"hdf5_parallel", true},
    {"hdf5_thread_safe", false}};

TEST(Libraries, AreComparedWithTheNode) {
  const auto torch = [](const Json& changes) { return Findings{check_libraries(with(libraries, changes)).front()}; };
  const auto hdf5 = [](const Json& changes) { return Findings{check_libraries(with(libraries, changes)).back()}; };
  expect_one(torch(Json::object()), ok, "2.13.0, CPU build");
  expect_one(torch({{"gpus_of_node", 4}}), warning, "the node has 4 GPUs, and this libtorch is built for CPUs alone");
  expect_one(torch({{"gpus_of_node", 1}, {"cuda", true}}), warning, "the node has 1 GPU, and libtorch sees none");
  expect_one(torch({{"cuda", true}}), warning, "the node has none");
  expect_one(torch({{"gpus_of_node", 2}, {"cuda", true}, {"gpus", 2}}), ok, "CUDA build, 2 GPUs");
  expect_one(hdf5(Json::object()), ok, "1.10.8, parallel; muster lets in one thread at a time");
  expect_one(hdf5({{"hdf5", "1.10.9"}}), ok, "1.10.9");
  expect_one(hdf5({{"hdf5", "1.14.3"}}), to_mend, "version 1.14.3 is loaded, and muster was built with 1.10.8");
}

TEST(Libraries, CountTheDeviceFilesOfGpus) {
  const test::Folder root;
  for (const auto* name : {"nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"}) write(root / "dev" / name, "");
  const auto facts = look_at_libraries(root);
  EXPECT_EQ(facts.at("gpus_of_node"), 2);
  EXPECT_EQ(facts.at("hdf5"), facts.at("hdf5_built"));
}

// ---- memory

const Json memory{{"problem", ""},   {"free_bytes", 8e9},   {"size_bytes", 8e9},      {"huge_pages", "madvise"},
                  {"pagemap", true}, {"single_copy", true}, {"ptrace_scope", nullptr}};

TEST(Memory, SharedMemoryMustHoldWhatRanksShare) {
  expect_one(check_memory(memory, 2), ok, "8.0 GB free");
  expect_one(check_memory(with(memory, {{"free_bytes", 64e6}, {"size_bytes", 64e6}}), 2), ok, "64.0 MB free");
  expect_one(check_memory(with(memory, {{"free_bytes", 60e6}, {"size_bytes", 64e6}}), 4), warning, "--shm-size");
  expect_one(check_memory(with(memory, {{"free_bytes", 60e6}}), 4), warning, "Remove old files");
  expect_one(check_memory(with(memory, {{"free_bytes", 5e6}}), 2), may_pass,
             "5.0 MB of 8.0 GB are free, and 2 ranks need 8.4 MB for MPI alone. Remove old files");
  expect_one(check_memory(with(memory, {{"free_bytes", 1e6}, {"size_bytes", 2e6}}), 1), to_mend, "1 rank needs");
  expect_one(check_memory(
                 with(memory, {{"problem", "Permission denied"}, {"free_bytes", nullptr}, {"size_bytes", nullptr}}), 2),
             warning, "Permission denied; ranks then exchange gradients through MPI");
}

TEST(Memory, WhatMakesItSlowerIsAWarning) {
  const auto second = [](const Json& changes) { return Findings{check_memory(with(memory, changes), 1).back()}; };
  expect_one(second({{"single_copy", false}}), warning, "process_vm_readv()");
  expect_one(second({{"ptrace_scope", 2}}), warning, "ptrace_scope is 2");
  expect_one(second({{"ptrace_scope", 1}}), ok, "free");
  expect_one(second({{"huge_pages", "never"}}), warning, "transparent huge pages are off");
}

TEST(Memory, ReadsTheKernelsFiles) {
  const test::Folder root;
  fs::create_directories(root / "dev/shm");
  write(root / "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  write(root / "proc/sys/kernel/yama/ptrace_scope", "1\n");
  write(root / "proc/meminfo", "MemTotal:       1000 kB\nMemFree: 10 kB\n");
  const auto facts = look_at_memory(root);
  EXPECT_EQ(facts.at("problem"), "");
  EXPECT_EQ(facts.at("huge_pages"), "never");
  EXPECT_EQ(facts.at("shm_huge_pages"), nullptr);
  EXPECT_EQ(facts.at("ptrace_scope"), 1);
  EXPECT_EQ(facts.at("memory_bytes"), 1'024'000);
  EXPECT_EQ(facts.at("pagemap"), false);
  EXPECT_TRUE(fs::is_empty(root / "dev/shm"));
  EXPECT_EQ(look_at_memory(root / "none").at("problem"), "No such file or directory");
}

// ---- cores

Json node_of(int cpus) { return {{"cpus", cpus}, {"quota", nullptr}, {"claims", Json::array()}}; }
Json rank_on(const std::string& mask, int threads = 0, int of_launcher = 1) {
  return {{"mask", mask}, {"threads", threads}, {"launcher_cpus", of_launcher}};
}

TEST(Cores, EachRankWantsItsOwn) {
  expect_one(check_cores(node_of(2), {rank_on("1"), rank_on("01")}), ok, "2 ranks on 2 CPUs, 2 threads in all");
  expect_one(check_cores(node_of(2), {rank_on("11"), rank_on("11")}), ok, "2 ranks on 2 CPUs, 2 threads in all");
  expect_one(check_cores(node_of(64), {rank_on("1"), rank_on("1")}), to_mend,
             "2 ranks of the node are bound to CPU 0, and it has 64");
  // Nothing can be mended on a node with one CPU.
  expect_one(check_cores(node_of(1), {rank_on("1"), rank_on("1")}), warning, "2 ranks share 1 CPU");
  expect_one(check_cores(node_of(2), {rank_on("11"), rank_on("11"), rank_on("11")}), warning, "3 ranks share 2 CPUs");
  expect_one(check_cores(node_of(4), {rank_on("1111", 4), rank_on("1111", 4)}), warning,
             "2 ranks with 8 threads in all share 4 CPUs");
  // Of a node that the job shares with others.
  expect_one(check_cores(node_of(64), {rank_on("1", 0, 2), rank_on("01", 0, 2)}), ok, "2 ranks on 2 CPUs");
  expect_one(check_cores(node_of(64), {rank_on("1", 0, 64), rank_on("01", 0, 64)}), warning,
             "each rank is bound to 1 of 64 CPUs");
  expect_one(check_cores(with(node_of(4), {{"quota", 1.5}}), {rank_on("1111"), rank_on("1111")}), warning,
             "grants 1.5 CPUs, and 2 ranks with 2 threads run there");
  const auto by_openmp = with(rank_on("1"), {{"bound_by", "GOMP_CPU_AFFINITY"}});
  expect_one(check_cores(node_of(4), {by_openmp, by_openmp}), warning,
             "GOMP_CPU_AFFINITY binds the threads of 2 ranks of the node to the same cores");
  const Json claims{{{"cpu", 0}, {"process", 4711}}, {{"cpu", 1}, {"process", 4711}}, {{"cpu", 3}, {"process", 5}}};
  expect_one(check_cores(with(node_of(4), {{"claims", claims}}), {rank_on("111"), rank_on("111")}), warning,
             "another muster launch (process 4711) uses 2 cores");
  expect_one(check_cores(with(node_of(4), {{"claims", claims}}), {rank_on("001")}), ok, "1 rank on 1 CPU");
}

TEST(Cores, ReadsTheQuotaOfTheControlGroupAndThoseAroundIt) {
  const test::Folder root;
  write(root / "sys/devices/system/cpu/online", "0-2,8\n");
  write(root / "proc/cpuinfo", "processor\t: 0\nmodel name\t: EPYC 7763\n");
  EXPECT_EQ(look_at_node_cores(root).at("quota"), nullptr);
  write(root / "proc/self/cgroup", "0::/job/step\n");
  write(root / "sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  write(root / "sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  const auto facts = look_at_node_cores(root);
  EXPECT_EQ(facts.at("cpus"), 4);
  EXPECT_EQ(facts.at("model"), "EPYC 7763");
  EXPECT_EQ(facts.at("quota"), 1.5);
  write(root / "proc/self/cgroup", "3:memory:/x\n4:cpu,cpuacct:/group\n");
  write(root / "sys/fs/cgroup/cpu/group/cpu.cfs_quota_us", "50000\n");
  write(root / "sys/fs/cgroup/cpu/group/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(look_at_node_cores(root).at("quota"), 0.5);
}

TEST(Cores, OfThisProcess) {
  const auto facts = look_at_rank_cores(environment_of({{"OMP_NUM_THREADS", "3"}}));
  EXPECT_EQ(facts.at("threads"), 3);
  EXPECT_EQ(facts.at("bound_by"), "");
  for (const char* const threads : {"99999999999", "4097", "0", "-1", "many", "3x"})
    EXPECT_EQ(look_at_rank_cores(environment_of({{"OMP_NUM_THREADS", threads}})).at("threads"), 0) << threads;
  EXPECT_EQ(look_at_rank_cores(environment_of({{"OMP_NUM_THREADS", " 4,2"}})).at("threads"), 4);
  EXPECT_EQ(look_at_rank_cores(environment_of({{"OMP_PROC_BIND", "close"}})).at("bound_by"), "OMP_PROC_BIND");
  EXPECT_EQ(look_at_rank_cores(environment_of({{"OMP_PROC_BIND", "FALSE"}})).at("bound_by"), "");
  for (const char* const places : {"OMP_PLACES", "GOMP_CPU_AFFINITY"}) {
    EXPECT_EQ(look_at_rank_cores(environment_of({{places, "0"}})).at("bound_by"), places);
    EXPECT_EQ(look_at_rank_cores(environment_of({{places, "0"}, {"OMP_PROC_BIND", "false"}})).at("bound_by"), "")
        << places;
  }
  EXPECT_NE(facts.at("mask").get<std::string>().find('1'), std::string::npos);
}

// ---- storage

const Json storage{{"wanted", "/scratch"}, {"parent_exists", true},     {"path", "/scratch"},      {"type", "Lustre"},
                   {"free_bytes", 5e12},   {"free_inodes", 1e6},        {"locks", true},           {"direct", true},
                   {"clock_ahead_s", 0.0}, {"problems", Json::array()}, {"write_bytes_per_s", 5e8}};

TEST(Storage, TriesTheNearestFolderAndLeavesNothing) {
  const test::Folder folder;
  const auto facts = look_at_storage(folder / "a/b/c");
  EXPECT_EQ(facts.at("path"), folder.path().string());
  EXPECT_EQ(facts.at("wanted"), folder.file("a/b/c"));
  EXPECT_EQ(facts.at("parent_exists"), false);
  EXPECT_EQ(look_at_storage(folder / "a").at("parent_exists"), true);
  EXPECT_EQ(facts.at("problems"), Json::array());
  EXPECT_EQ(facts.at("locks"), true);
  EXPECT_GT(facts.at("write_bytes_per_s"), 0);
  EXPECT_LT(std::abs(facts.at("clock_ahead_s").get<double>()), 1);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Storage, OfAFileIsAProblem) {
  const test::Folder folder;
  write(folder / "file", "x");
  const auto facts = look_at_storage(folder / "file");
  EXPECT_EQ(facts.at("problems").at(0).at("error"), ENOTDIR);
  expect_one(check_storage(facts), to_mend,
             "making a folder in " + facts.at("path").get<std::string>() + ": Not a directory");
}

TEST(Storage, ErrorsAreToBeMendedOrMayPass) {
  const auto failed = [](int error, const char* text) {
    return with(storage, {{"problems", {{{"doing", "creating a file"}, {"error", error}, {"text", text}}}}});
  };
  expect_one(check_storage(failed(EROFS, "Read-only file system")), to_mend,
             "creating a file in /scratch: Read-only file system");
  expect_one(check_storage(failed(ENOSPC, "No space left on device")), may_pass, "Free some space");
  for (const int error : {EDQUOT, EIO, ESTALE, ETIMEDOUT}) EXPECT_EQ(severity_of(error), may_pass);
  for (const int error : {EACCES, EPERM, EROFS, ENOTDIR}) EXPECT_EQ(severity_of(error), to_mend);
}

TEST(Storage, IsJudgedByItsFacts) {
  expect_one(check_storage(storage), ok, "Lustre, 5.0 TB free, takes 500.0 MB/s past the cache");
  expect_one(check_storage(with(storage, {{"wanted", "/scratch/runs"}})), ok, "made in /scratch, Lustre");
  expect_one(check_storage(with(storage, {{"wanted", "/scratch/a/runs"}, {"parent_exists", false}})), warning,
             "only /scratch is there");
  expect_one(check_storage(with(storage, {{"free_bytes", 5e8}})), warning, "only 500.0 MB are free");
  expect_one(check_storage(with(storage, {{"free_bytes", 5e7}})), may_pass, "only 50.0 MB are free");
  expect_one(check_storage(with(storage, {{"free_inodes", 7}})), warning, "only 7 more files fit");
  expect_one(check_storage(with(storage, {{"free_inodes", nullptr}})), ok, "Lustre");
  expect_one(check_storage(with(storage, {{"locks", false}})), warning, "has no locks");
  expect_one(check_storage(with(storage, {{"type", "tmpfs"}})), warning, "it is in memory (tmpfs)");
  expect_one(check_storage(with(storage, {{"clock_ahead_s", -2.5}})), warning, "2.5 s behind this node's");
  expect_one(check_storage(with(storage, {{"clock_ahead_s", 3.0}})), warning, "3.0 s ahead of this node's");
  expect_one(check_storage(with(storage, {{"write_bytes_per_s", 1e6}})), warning, "it takes 1.0 MB/s");
}

TEST(Storage, MustBeTheSameOnAllNodes) {
  const Json seen{{"path", "/scratch"}, {"seen", true}, {"after_s", 0.01}, {"sees_lock", true}};
  EXPECT_TRUE(check_shared_storage(seen, "n1").empty());
  EXPECT_TRUE(check_shared_storage(nullptr, "n1").empty());
  expect_one(check_shared_storage(with(seen, {{"seen", false}}), "n1"), to_mend,
             "a file that n1 has written is not seen within 5 s");
  expect_one(check_shared_storage(with(seen, {{"after_s", 2.5}}), "n1"), warning, "is seen only after 2.5 s");
  expect_one(check_shared_storage(with(seen, {{"sees_lock", false}}), "n1"), warning, "a lock of n1 is not seen");
}

// ---- Slurm

constexpr const char* config =
    "Configuration data as of 2024-01-01T00:00:00\nKillOnBadExit           = 1\nKillWait                = 30 sec\n"
    "MpiDefault              = pmix\nPreemptMode             = REQUEUE\n";
constexpr std::chrono::system_clock::time_point now{std::chrono::seconds(1'000'000)};

Findings slurm(const std::string& changed, const std::string& job = "JobId=7 Requeue=1 Restarts=0",
               const char* end = nullptr) {
  std::map<std::string, std::string> variables{{"SLURM_JOB_ID", "7"}};
  if (end != nullptr) variables["SLURM_JOB_END_TIME"] = end;
  const auto facts = look_at_slurm(environment_of(variables), [&](const std::vector<std::string>& words) {
    return Json(words.at(0) == "scontrol" && words.at(2) == "config" ? config + changed : job);
  });
  return check_slurm(facts, now);
}

TEST(Slurm, IsJudgedByItsConfigurationAndTheJob) {
  expect_one(slurm(""), ok, "MpiDefault pmix, KillWait 30 sec");
  expect_one(slurm("MpiDefault = none\n"), warning, "srun --mpi=pmix");
  expect_one(slurm("MpiDefault = pmix_v4\n"), ok, "pmix_v4");
  expect_one(slurm("KillOnBadExit = 0\n"), warning, "--kill-on-bad-exit=1");
  expect_one(slurm("KillWait = 5 sec\n"), warning, "KillWait leaves 5 sec");
  expect_one(slurm("PreemptMode = GANG,CANCEL\n"), warning, "PreemptMode is GANG,CANCEL");
  expect_one(slurm("", "JobId=7 Requeue=0"), warning, "sbatch --requeue");
  expect_one(slurm("", "JobId=7 Requeue=1", "1000060"), warning, "the allocation ends in 60 s");
  expect_one(slurm("", "JobId=7 Requeue=1", "1009999"), ok, "pmix");
  expect_one(slurm("", "JobId=7 Requeue=1", "999999"), ok, "pmix");  // of an earlier allocation
}

TEST(Slurm, MayBeAbsentOrSilent) {
  const auto silent = [](const std::vector<std::string>&) { return Json(); };
  EXPECT_TRUE(look_at_slurm(environment_of({}), silent).is_null());
  EXPECT_TRUE(check_slurm(nullptr, now).empty());
  expect_one(check_slurm(look_at_slurm(environment_of({{"SLURM_JOB_ID", "7"}}), silent), now), warning,
             "scontrol does not answer");
}

// ---- several nodes

Json node(const std::string& host, const Json& changes = Json::object()) {
  return with({{"host", host},
               {"muster", "0.1.0"},
               {"libtorch", "2.13.0"},
               {"hdf5", "1.10.8"},
               {"mpi", "Open MPI v4.1.4"},
               {"cpu", "EPYC"},
               {"huge_pages", "madvise"},
               {"memory_bytes", 1e11},
               {"clock_s", 100.0}},
              changes);
}

TEST(Nodes, AreCompared) {
  EXPECT_TRUE(check_differences({node("n1"), node("n2", {{"memory_bytes", 1.01e11}, {"clock_s", 100.5}})}).empty());
  expect_one(check_differences({node("n1"), node("n2"), node("n3", {{"libtorch", "2.12.0"}})}), to_mend,
             "libtorch differs: 2.12.0 on n3; 2.13.0 on n1, n2");
  expect_one(check_differences({node("n1"), node("n2", {{"muster", "0.2.0"}})}), to_mend, "muster differs");
  expect_one(check_differences({node("n1"), node("n2", {{"cpu", "Xeon"}})}), warning,
             "CPU differs: EPYC on n1; Xeon on n2");
  expect_one(check_differences({node("n1"), node("n2", {{"huge_pages", "never"}})}), warning, "huge pages differs");
  expect_one(check_differences({node("n1"), node("n2", {{"memory_bytes", 5e10}})}), warning,
             "50.0 GB on n2, 100.0 GB on n1");
  expect_one(check_differences({node("n1"), node("n2", {{"clock_s", 103.0}})}), warning,
             "the clock of n2 is 3 s ahead of that of n1");
}

TEST(Nodes, WithTheSameFindingShareIt) {
  const auto all = merged({{ok, "MPI", "4.1", "", {"n1"}},
                           {warning, "cores", "3 ranks share 2 CPUs", "Start fewer", {"n1"}},
                           {warning, "cores", "5 ranks share 2 CPUs", "Start fewer", {"n2"}},
                           {to_mend, "storage", "not seen", "Share it", {"n2"}},
                           {ok, "MPI", "4.1", "", {"n2"}},
                           {may_pass, "storage", "full", "Wait", {"n3"}}});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].fact, "not seen");
  EXPECT_EQ(all[1].fact, "full");
  EXPECT_EQ(all[2].fact, "on n1 3 ranks share 2 CPUs");
  EXPECT_EQ(all[2].hosts, (std::vector<std::string>{"n1", "n2"}));
  EXPECT_EQ(all[3].fact, "4.1");
  EXPECT_EQ(all[3].hosts, (std::vector<std::string>{"n1", "n2"}));
}

TEST(Examination, GivesAnExitCode) {
  Examination examination;
  EXPECT_EQ(examination.exit_code(), ExitCode::done);
  examination.findings = {{warning, "", "", "", {}}};
  EXPECT_EQ(examination.exit_code(), ExitCode::done);
  examination.findings.push_back({may_pass, "", "", "", {}});
  EXPECT_EQ(examination.exit_code(), ExitCode::retry);
  examination.findings.push_back({to_mend, "", "", "", {}});
  EXPECT_EQ(examination.exit_code(), ExitCode::missing_package);
}

TEST(Sizes, HaveUnits) {
  EXPECT_EQ(bytes_text(12), "12 B");
  EXPECT_EQ(bytes_text(47e6), "47.0 MB");
  EXPECT_EQ(bytes_text(2.5e12), "2.5 TB");
}

}  // namespace
}  // namespace muster::detail::doctor::doctor_test
