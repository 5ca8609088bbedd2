// Takes samples from the solvers' rings into memory, on a thread of its own. Uses neither MPI nor torch.
#pragma once

#include "live/reservoir.hpp"
#include "live/sender/ring.h"
#include "muster/error.hpp"
#include "muster/live.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace muster::detail::live {

/// A file descriptor, closed by the destructor.
class Descriptor {
 public:
  Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  operator int() const noexcept { return number_; }

 private:
  int number_;
};

/// One column of all samples in memory.
struct LiveColumn {
  std::string name;
  int type = MUSTER_LIVE_FLOAT64;
  std::vector<std::int64_t> shape = {};
  std::int64_t bytes = 8;     ///< of a sample
  std::byte* data = nullptr;  ///< [samples in memory] of `bytes` each
};

/// This rank's place among the trainer's ranks, and what they have in common.
struct Stream {
  std::string token, name;
  int rank = 0, ranks = 1;
  LiveOptions options = {};
  std::uint64_t seed = 0;
};

class Receiver {
 public:
  /// Binds this rank's address. Throws an Error (ExitCode::usage) if another Live of the job has it.
  explicit Receiver(Stream stream);
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;
  /// Tells the solvers that the trainer has ended.
  ~Receiver();

  /// Begins to receive, when all ranks have bound their addresses.
  void start();
  /// Returns when the first solver has declared its samples. Throws an Error past the timeout, or if the memory holds
  /// too few of them.
  void wait_for_solver();
  void stop_solvers();

  const Stream stream;

  // The members below are used with `mutex` locked. `changed` is notified when a sample has come or a solver has ended.
  std::mutex mutex;
  std::condition_variable changed;

  /// Tells the solvers with which sample to go on, if they do not know it yet, and receives after a pause().
  void resume();
  /// Changes no sample in memory until resume(), so that it can be saved.
  void pause(std::unique_lock<std::mutex>& lock);
  /// Receives after a pause(), without telling the solvers anything.
  void end_pause() {
    if (std::exchange(is_paused_, false)) wake();
  }
  const std::vector<LiveColumn>& columns() const noexcept { return columns_; }
  Reservoir& reservoir() noexcept { return *reservoir_; }
  /// True if all solvers have ended, and all of their samples for this rank have come.
  bool all_ended() const noexcept;
  /// What the solvers have sent and dropped themselves: those that have ended, before a restart too, and those here.
  struct Sent {
    std::int64_t sent = 0, dropped = 0;
  };
  Sent sent() const noexcept;
  /// For a restart: what was sent before, and the samples to go on with.
  void restore(const Sent& before, const std::vector<std::int64_t>& next_samples);
  /// For each solver, the sample after the last one that has come to this rank.
  std::vector<std::int64_t> next;

 private:
  /// A solver's rank: its ring, null until it has come, and its socket, none after it has ended.
  struct Rank {
    Descriptor socket;
    std::shared_ptr<live_ring> ring;
  };
  struct Solver {
    live_hello hello;
    std::vector<Rank> ranks;
    std::int64_t seq = 0;  ///< the next sample of this rank
    bool is_taking = false;
    std::int64_t number = 0;                     ///< of the sample that is being taken
    std::optional<std::int64_t> slot = {};       ///< where it goes; none if it is dropped
    bool is_ready = false, was_refused = false;  ///< all rings have come; its fields are not those of others

    bool has_ended() const;
  };
  enum class Step { done, nothing, blocked };

  void run();
  bool receive_all();
  Step receive(Solver& solver);
  Step claim(Solver& solver);
  /// The slots of the sample that is being taken are copied, if `arrived`, and empty again.
  Step finish(Solver& solver, bool arrived);
  void serve_events(bool may_wait);
  void accept_one();
  void greet(Descriptor socket);
  std::string reason_to_refuse(const live_hello& hello) const;
  void read_from(Solver& solver, Rank& rank);
  void map_ring(Solver& solver, Rank& rank, Descriptor file);
  void begin(Solver& solver);
  void make_memory(const live_layout& layout);
  void tell_solvers();
  void end(Solver& solver);
  void wake() const;
  static void wake(const Rank& rank);

  Descriptor listener_, event_;
  std::vector<Descriptor> strangers_;  ///< connections that have not said who they are
  std::vector<Solver> solvers_;
  std::set<int> ended_;                      ///< the numbers of solvers that have ended
  Sent before_, ended_sent_;                 ///< before a restart; of solvers that have ended
  std::vector<std::int64_t> resent_before_;  ///< for each solver: earlier samples have come before the restart
  bool is_paused_ = false, is_copying_ = false, knows_next_ = false, stops_solvers_ = false, is_ending_ = false;
  std::optional<Error> error_;  ///< why there is no memory for samples
  std::vector<LiveColumn> columns_;
  std::shared_ptr<std::byte> memory_;
  std::optional<Reservoir> reservoir_;
  std::thread thread_;
};

}  // namespace muster::detail::live
