// The timeouts of a world, which apply to all of its communicators.
#pragma once

#include "base/export.hpp"
#include "muster/communicator.hpp"

#include <chrono>

namespace muster::detail::comm {

/// Sets the timeout of later waits on communicators of this world, unless a wait has its own.
MUSTER_INTERNAL_API void set_timeout(const Communicator& communicator, std::chrono::milliseconds timeout);
MUSTER_INTERNAL_API std::chrono::milliseconds timeout(const Communicator& communicator);

/// How long a rank that has failed waits for the other ranks to agree on the error, if nothing will be retried; then it
/// ends the job. The default is 30 s, so that a failed job ends soon. Set it higher if the end of the job would also
/// end other work.
MUSTER_INTERNAL_API void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace);
MUSTER_INTERNAL_API std::chrono::milliseconds final_grace(const Communicator& communicator);

/// While it lives, the world has the timeout `own`. The destructor restores the earlier timeout.
class ScopedTimeout {
 public:
  ScopedTimeout(const Communicator& communicator, std::chrono::milliseconds own)
      : communicator_(communicator), before_(timeout(communicator)) {
    set_timeout(communicator_, own);
  }
  ScopedTimeout(const ScopedTimeout&) = delete;
  ScopedTimeout& operator=(const ScopedTimeout&) = delete;
  ~ScopedTimeout() { set_timeout(communicator_, before_); }

 private:
  Communicator communicator_;
  std::chrono::milliseconds before_;
};

}  // namespace muster::detail::comm
