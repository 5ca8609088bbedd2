// The time limits of a world, which every communicator over its ranks has.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <chrono>

namespace muster::detail::comm {

/// The limit for every later wait on communicators of this world.
MUSTER_INTERNAL_API void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit);
MUSTER_INTERNAL_API std::chrono::milliseconds time_limit(const Communicator& communicator);

/// How long a rank that has failed waits for the other ranks to agree on the error if nothing will be retried; then it
/// ends the job. 30 s by default, so that a failed job ends soon. Set it higher if other work would end with the job.
MUSTER_INTERNAL_API void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace);
MUSTER_INTERNAL_API std::chrono::milliseconds final_grace(const Communicator& communicator);

/// Sets the time limit while it lives.
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

}  // namespace muster::detail::comm
