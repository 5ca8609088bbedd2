// Only one job has a run's folder, whichever process is killed, with the file system's locks and without.
#include "run/run_lock.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace {
/// Of this process: the file system keeps no locks, or this rank does not see that of rank 0.
enum class Locks { kept, none, not_seen } locks = Locks::kept;
/// A lock that this process has not got it has asked for so often.
std::atomic<int> refusals{0};
}  // namespace

// Stands in for the C library's own.
extern "C" int fcntl(int descriptor, int command, ...) {
  std::va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  if (locks == Locks::none && (command == F_OFD_SETLK || command == F_OFD_GETLK)) return errno = ENOSYS, -1;
  static auto* const real = reinterpret_cast<int (*)(int, int, ...)>(::dlsym(RTLD_NEXT, "fcntl"));
  const int status = real(descriptor, command, argument);
  refusals += command == F_OFD_SETLK && status != 0;
  if (locks == Locks::not_seen && command == F_OFD_GETLK) static_cast<struct flock*>(argument)->l_type = F_UNLCK;
  return status;
}

namespace muster::detail::run::run_lock_test {
namespace {

using namespace std::chrono_literals;
using test::Folder;

/// A process that does `work`, says so, and waits to be killed.
class Process {
 public:
  explicit Process(const std::function<void()>& work) {
    int said[2];
    if (::pipe(said) != 0) throw std::runtime_error("no pipe");
    id_ = ::fork();
    if (id_ == 0) {
      try {
        work();
        if (::write(said[1], "y", 1) != 1) ::_exit(1);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        ::_exit(1);
      }
      for (;;) ::pause();
    }
    ::close(said[1]);
    char word = 0;
    EXPECT_EQ(::read(said[0], &word, 1), 1);
    ::close(said[0]);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { kill(); }

  pid_t id() const noexcept { return id_; }
  void kill() {
    if (id_ == 0) return;
    ::kill(id_, SIGKILL);
    ::waitpid(id_, nullptr, 0);
    id_ = 0;
  }

 private:
  pid_t id_ = 0;
};

std::string error_of(const std::function<void()>& call, ExitCode code = ExitCode::usage) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

/// A process of a job, which keeps what it has locked.
void hold(const Folder& folder, bool is_root) { new RunLock(folder, is_root); }

TEST(RunLock, ASecondJobHearsWhoHasTheFolder) {
  const Folder folder;
  ::setenv("SLURM_JOB_ID", "4711", 1);
  Process root([&] { hold(folder, true); });
  ::unsetenv("SLURM_JOB_ID");
  const auto text = error_of([&] { RunLock(folder, true); });
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  for (const auto& part : {host + std::string(", process ") + std::to_string(root.id()), std::string("since 20"),
                           std::string("Slurm job 4711"), std::string("choose another --name")})
    EXPECT_SAYS(text, part);
  root.kill();
  EXPECT_TRUE(RunLock(folder, true).sees_root_lock()) << "a crash leaves no lock";
  EXPECT_EQ(read_file(folder / ".lock"), "") << "who ends by himself leaves no name";
}

TEST(RunLock, ARemovedLockIsSeenOnceAnotherJobHasOne) {
  const Folder folder;
  const RunLock first(folder, true);
  EXPECT_FALSE(first.is_lock_replaced());
  std::filesystem::remove(folder / ".lock");
  EXPECT_FALSE(first.is_lock_replaced());
  const RunLock second(folder, true);
  EXPECT_TRUE(first.is_lock_replaced());
  EXPECT_FALSE(second.is_lock_replaced());
}

TEST(RunLock, RanksThatAreLeftKeepTheFolder) {
  const Folder folder;
  Process root([&] { hold(folder, true); });
  auto rank = std::make_unique<Process>([&] { hold(folder, false); });
  root.kill();
  // The next job waits for it, and starts when it has ended.
  Process next_job([&] {
    if (::fork() != 0) return;
    RunLock next(folder, true);
    write_file(folder / "started", "");
    ::_exit(0);
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "started"));
  rank.reset();
  while (!std::filesystem::exists(folder / "started")) {
  }
}

TEST(RunLock, RanksThatStayAreSaid) {
  const Folder folder;
  Process root([&] { hold(folder, true); });
  Process rank([&] { hold(folder, false); });
  root.kill();
  EXPECT_SAYS(error_of([&] { RunLock(folder, true); }), "are still there");
}

/// While it lives, this process looks as if `muster run` had started it.
struct Supervised {
  explicit Supervised(const char* id = "7.1") { ::setenv("MUSTER_SUPERVISOR", id, 1); }
  Supervised(const Supervised&) = delete;
  Supervised& operator=(const Supervised&) = delete;
  ~Supervised() { ::unsetenv("MUSTER_SUPERVISOR"); }
};

TEST(RunLock, AChildOfForkHoldsNothing) {
  const Folder folder;
  for (const bool is_killed : {false, true}) {
    int id[2];
    ASSERT_EQ(::pipe(id), 0);
    Process root([&] {
      auto* const lock = new RunLock(folder, true);
      if (::fork() == 0) {  // fork() has returned here, so the child has given up what it inherited
        const pid_t own = ::getpid();
        if (::write(id[1], &own, sizeof own) != sizeof own) ::_exit(1);
        for (;;) ::pause();
      }
      if (!is_killed) delete lock;
    });
    ::close(id[1]);
    pid_t child = 0;
    ASSERT_EQ(::read(id[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
    ::close(id[0]);
    if (is_killed) root.kill();
    EXPECT_EQ(error_of([&] { RunLock(folder, true); }), "no error")
        << (is_killed ? "the child keeps what its killed parent had" : "the child keeps what its parent has given up");
    ::kill(child, SIGKILL);
  }
}

TEST(RunLock, AWaitIsAnnounced) {
  const Folder folder;
  const Supervised supervised;
  Process root([&] { hold(folder, true); });
  std::vector<std::chrono::milliseconds> announced;
  const auto note = [&](std::chrono::milliseconds most) { announced.push_back(most); };
  const auto text = error_of([&] { RunLock(folder, true, 20ms, note); }, ExitCode::retry);
  EXPECT_SAYS(text, "are still there");
  EXPECT_EQ(announced, std::vector{20ms});
  root.kill();
  announced.clear();
  EXPECT_TRUE(RunLock(folder, true, 20ms, note).sees_root_lock());
  EXPECT_TRUE(announced.empty());
}

TEST(RunLock, AnEarlierStartOfTheSameJobIsWaitedFor) {
  const Folder folder;
  const Supervised supervised;
  Process root([&] { hold(folder, true); });
  {
    const Supervised other("7.2");
    EXPECT_SAYS(error_of([&] { RunLock(folder, true); }), "another job is using it");
  }
  const Supervised again;
  refusals = 0;
  std::atomic<bool> over{false};
  std::thread ender([&] {
    while (refusals < 3 && !over) std::this_thread::yield();
    root.kill();
  });
  EXPECT_EQ(error_of([&] { RunLock(folder, true); }), "no error");
  over = true;
  ender.join();
}

TEST(RunLock, AnEarlierStartThatDoesNotEndMayEndLater) {
  const Folder folder;
  const Supervised supervised;
  Process root([&] { hold(folder, true); });
  const auto text = error_of([&] { RunLock(folder, true, std::chrono::milliseconds(1)); }, ExitCode::retry);
  EXPECT_SAYS(text, "process " + std::to_string(root.id()));
  EXPECT_SAYS(text, "are still there");
  root.kill();
  const RunLock own(folder, true);
  EXPECT_SAYS(error_of([&] { RunLock(folder, true); }), "another job is using it");
}

TEST(RunLease, StandsInWhereNoLocksAreKept) {
  locks = Locks::none;
  const Folder folder;
  const auto take = [&] {
    auto lock = std::make_unique<RunLock>(folder, true);
    EXPECT_FALSE(lock->sees_root_lock());
    lock->take_lease({RunLock::this_process()});
    return lock;
  };
  {
    const auto first = take();
    const auto text = error_of(take);
    EXPECT_SAYS(text, "process " + std::to_string(::getpid()));
    EXPECT_EQ(text.find("remove"), std::string::npos) << "it is seen to be alive: " << text;
  }
  take();
  Process killed([&] { take().release(); });
  EXPECT_SAYS(error_of(take), "process " + std::to_string(killed.id()));
  killed.kill();
  take();
  // A rank goes on in a job whose rank 0 was killed.
  Process rank([&] { write_file(folder / "rank", RunLock::this_process()); });
  Process root([&] {
    auto lock = std::make_unique<RunLock>(folder, true);
    lock->take_lease({RunLock::this_process(), read_file(folder / "rank")});
    lock.release();
  });
  root.kill();
  EXPECT_SAYS(error_of(take), "another job is using it");
  rank.kill();
  take();
  locks = Locks::kept;
}

TEST(RunLease, OfAnotherHostIsLeftToAPerson) {
  locks = Locks::none;
  const Folder folder;
  const auto take = [&] { RunLock(folder, true).take_lease({RunLock::this_process()}); };
  write_file(folder / ".lease.7", R"({"holder": "far away", "processes": ["other-boot pid:[1] 1 2"], "slurm_job": "12",
    "slurm_restarts": 0})");
  const auto text = error_of(take);
  for (const auto* part : {"far away", "remove", ".lease.7"}) EXPECT_SAYS(text, part);
  ::setenv("SLURM_JOB_ID", "12", 1);
  EXPECT_SAYS(error_of(take), "far away") << "another step of the same job may be running";
  ::setenv("SLURM_RESTART_COUNT", "1", 1);
  EXPECT_EQ(error_of(take), "no error") << "Slurm has started it again";
  ::unsetenv("SLURM_JOB_ID");
  ::unsetenv("SLURM_RESTART_COUNT");
  EXPECT_TRUE(std::filesystem::exists(folder / ".lease.8") && !std::filesystem::exists(folder / ".lease.7"));
  write_file(folder / ".lease.8", "");
  EXPECT_SAYS(error_of(take), "has not written its name yet");
  std::filesystem::remove(folder / ".lease.8");
  EXPECT_EQ(error_of(take), "no error");
  // A job that got its lock while the file system still kept locks.
  std::filesystem::remove(folder / ".lease.1");
  write_file(folder / ".lock", R"({"holder": "far away", "processes": ["other-boot pid:[1] 1 2"]})");
  EXPECT_SAYS(error_of(take), "far away");
  locks = Locks::kept;
}

TEST(RunLease, OfAnEarlierStartOfTheSameJobHasEndedOnOtherHosts) {
  locks = Locks::none;
  const Folder folder;
  const auto take = [&](std::chrono::milliseconds patience = std::chrono::minutes(5)) {
    RunLock(folder, true, patience).take_lease({RunLock::this_process()});
  };
  const auto leave = [&](const std::string& processes) {
    write_file(folder / ".lease.7",
               "{\"holder\": \"far away\", \"supervisor\": \"7.1\", \"processes\": [\"other-boot pid:[1] 1 2\"" +
                   processes + "]}");
  };
  leave("");
  EXPECT_SAYS(error_of([&] { take(); }), "far away");
  const Supervised supervised;
  EXPECT_EQ(error_of([&] { take(); }), "no error") << "its supervisor has ended it";
  // Here it is noticed, by each rank for its own node.
  Process rank([&] { write_file(folder / "rank", RunLock::this_process()); });
  std::filesystem::remove(folder / ".lease.8");
  leave(", \"" + read_file(folder / "rank") + "\"");
  const std::chrono::milliseconds at_once(1);
  EXPECT_SAYS(error_of([&] { take(at_once); }, ExitCode::retry), "far away");
  EXPECT_SAYS(error_of([&] { RunLock(folder, false, at_once); }, ExitCode::retry), "far away");
  rank.kill();
  EXPECT_EQ(error_of([&] { RunLock(folder, false, at_once); }), "no error");
  EXPECT_EQ(error_of([&] { take(at_once); }), "no error");
  locks = Locks::kept;
}

TEST(RunLease, OfTwoJobsThatWantItOneGetsIt) {
  locks = Locks::none;
  const Folder folder;
  write_file(folder / ".lease.1", R"({"holder": "gone", "processes": []})");
  constexpr int count = 8;
  std::vector<pid_t> jobs;
  const auto files = [&](const std::string& prefix) {
    int found = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      found += entry.path().filename().string().starts_with(prefix);
    return found;
  };
  for (int job = 0; job < count; ++job) {
    jobs.push_back(::fork());
    if (jobs.back() != 0) continue;
    const auto said = [&](const char* what) { write_file(folder / (what + std::to_string(job)), ""); };
    said("ready.");
    while (files("ready.") < count) {
    }
    std::optional<RunLock> lock;
    try {
      lock.emplace(folder, true);
      lock->take_lease({RunLock::this_process()});
      said("won.");
    } catch (const Error&) {
    }
    said("tried.");
    for (;;) ::pause();
  }
  while (files("tried.") < count) {
  }
  EXPECT_EQ(files("won."), 1);
  for (const auto job : jobs) {
    ::kill(job, SIGKILL);
    ::waitpid(job, nullptr, 0);
  }
  locks = Locks::kept;
}

TEST(RunLease, StandsInWhereLocksEndAtTheNode) {
  const Folder folder;
  const RunLock root(folder, true);
  EXPECT_TRUE(RunLock(folder, false).sees_root_lock());
  locks = Locks::not_seen;
  EXPECT_FALSE(RunLock(folder, false).sees_root_lock());
  locks = Locks::kept;
}

}  // namespace
}  // namespace muster::detail::run::run_lock_test
