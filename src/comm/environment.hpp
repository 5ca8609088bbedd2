// The life of MPI in this process.
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <optional>

namespace muster::detail::comm {

/// Initialises MPI (THREAD_MULTIPLE) unless somebody has, and finalises it only if it did. One per process.
class Environment {
 public:
  Environment();
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment();

  /// All ranks of MPI_COMM_WORLD, over a channel of its own.
  const Communicator& world() const noexcept { return *world_; }

 private:
  bool initialised_here_ = false;
  std::optional<Communicator> world_;
};

/// Whether MPI may be called by several threads at once (MPI_THREAD_MULTIPLE).
bool has_threads() noexcept;

/// The limit of every wait on communicators of this world, from now on.
void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit);
std::chrono::milliseconds time_limit(const Communicator& communicator);

/// Sets the limit while it lives.
class TimeLimit {
 public:
  TimeLimit(const Communicator& communicator, std::chrono::milliseconds limit)
      : communicator_(communicator), before_(time_limit(communicator)) {
    set_time_limit(communicator_, limit);
  }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;
  ~TimeLimit() { set_time_limit(communicator_, before_); }

 private:
  Communicator communicator_;
  std::chrono::milliseconds before_;
};

/// Ends all processes of MPI_COMM_WORLD with that code: the last resort.
[[noreturn]] void abort(int code) noexcept;

}  // namespace muster::detail::comm
