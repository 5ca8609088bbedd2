#include "comm/progress.hpp"

#include "base/text.hpp"
#include "base/thread.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <list>
#include <thread>
#include <utility>

namespace muster::detail::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Progress {
  std::mutex operations;  ///< locked before `mutex`
  std::mutex mutex;       ///< guards the members below
  std::condition_variable changed;
  std::list<std::function<Advanced()>> added;
  clockid_t owner{};  ///< the CPU-time clock of the thread that has added the last operation
  bool is_started = false;
  std::atomic<bool> is_ended{false};  ///< written with both mutexes locked
  std::atomic<bool> is_finalised{false}, is_forked{false};
};

Progress& progress() {
  static auto* const progress = new Progress;  // never destroyed: the thread may be running when the process exits
  return *progress;
}

/// Lets the thread rest between two rounds. While the program computes, the thread sleeps, to leave the core to the
/// program; also if cores do not suffice, or if nothing has ended for 200 ms. Otherwise it only offers the core to
/// others.
class Rest {
 public:
  void restart() { begun_ = Clock::now(); }
  void take(clockid_t owner) {
    constexpr auto nap = 50us, longest = 1000us, between_looks = 20us;
    const auto now = Clock::now();
    if (now - looked_ >= between_looks) {
      timespec used{};
      const bool is_alive = ::clock_gettime(owner, &used) == 0;
      const auto cpu = std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
      computes_ = is_alive && owner == owner_ && 2 * (cpu - cpu_) > now - looked_;
      looked_ = now, cpu_ = cpu, owner_ = owner;
    }
    if (now - begun_ > 200ms)
      std::this_thread::sleep_for(longest);
    else if (computes_ || !has_core_per_rank)
      std::this_thread::sleep_for(nap);
    else if (now - yielded_ < 40us)
      pause();
    else {
      std::this_thread::yield();
      yielded_ = Clock::now();
    }
  }

 private:
  Clock::time_point begun_{}, looked_{}, yielded_{};
  std::chrono::nanoseconds cpu_{};
  clockid_t owner_{};
  bool computes_ = true;
};

void run() {
  auto& all = progress();
  std::list<std::function<Advanced()>> mine;
  Rest rest;
  for (;;) {
    clockid_t owner{};
    {
      std::unique_lock lock(all.mutex);
      if (mine.empty()) all.changed.wait(lock, [&] { return all.is_ended || !all.added.empty(); });
      if (all.is_ended) return;
      if (!all.added.empty()) rest.restart();
      mine.splice(mine.end(), all.added);
      owner = all.owner;
    }
    for (auto one = mine.begin(); one != mine.end();) {
      Advanced advanced;
      {
        const std::lock_guard lock(all.operations);
        if (all.is_ended) return;
        advanced = (*one)();
      }
      if (advanced.is_over) rest.restart();
      if (advanced.then) advanced.then();
      one = advanced.is_over ? mine.erase(one) : std::next(one);
    }
    if (!mine.empty()) rest.take(owner);
  }
}

void lock_before_fork() {
  progress().operations.lock();
  progress().mutex.lock();
}
void unlock_after_fork() {
  progress().mutex.unlock();
  progress().operations.unlock();
}
void forget_after_fork() {
  progress().is_forked = progress().is_ended = true;
  unlock_after_fork();
}

}  // namespace

void prepare_progress() {
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork(lock_before_fork, unlock_after_fork, forget_after_fork);
    call_before_finalize([] {
      end_progress();
      progress().is_finalised = true;
    });
  });
}

void require_progress(const char* doing, const char* operation) {
  if (is_forked())
    throw Error(ExitCode::usage, str(doing, operation),
                "this process is a child of fork(), which cannot use its parent's MPI",
                "Communicate in the process that has initialised MPI");
  if (progress().is_finalised)
    throw Error(ExitCode::usage, str(doing, operation), "MPI is finalised already", "Communicate before MPI_Finalize");
}

bool is_forked() noexcept { return progress().is_forked; }

std::mutex& operation_mutex() noexcept { return progress().operations; }

bool advance_in_background(std::function<Advanced()> advance) {
  static const bool may_start = threads_may_call_mpi();
  auto& all = progress();
  {
    const std::lock_guard lock(all.mutex);
    if (!may_start || all.is_ended) return false;
    all.added.push_back(std::move(advance));
    ::pthread_getcpuclockid(::pthread_self(), &all.owner);
    if (!std::exchange(all.is_started, true)) {
      std::atexit([] { end_progress(); });
      start_thread("muster-progress", run).detach();
    }
  }
  all.changed.notify_one();
  return true;
}

bool has_progress_ended() noexcept { return progress().is_ended; }

void end_progress() noexcept {
  auto& all = progress();
  {
    const std::scoped_lock lock(all.operations, all.mutex);
    all.is_ended = true;
  }
  all.changed.notify_one();
}

}  // namespace muster::detail::comm
