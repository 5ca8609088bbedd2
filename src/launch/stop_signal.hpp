// The request to stop: SIGUSR1, SIGUSR2, SIGHUP (a lost terminal), and SIGTERM in two cases: if the caller of
// install_handlers() wants it, and under `muster run` in a batch job, since batch systems send SIGTERM to all processes
// of a job that they are about to end.
//
// Loading muster changes no signal's disposition. A Launch handles the signals from the moment it is made; a signal
// that comes before has the same effect as without muster. If that signal ends a rank, `muster run` counts the rank as
// stopped. This code is a separate library that the loader initialises before all others, since libraries of MPI's
// networks may install handlers of their own.
#pragma once

#include "base/export.hpp"

#include <signal.h>

#include <string>

namespace muster::detail::launch::stop_signal {

/// True if a request to stop has come since the first Launch was made.
MUSTER_INTERNAL_API bool is_requested() noexcept;

/// The first signal that has requested to stop; 0 if none has.
MUSTER_INTERNAL_API int requested_by() noexcept;

/// True if SIGHUP was ignored when the program was started (nohup), or is ignored now. Some libraries of MPI's networks
/// install a handler for it when they are loaded.
MUSTER_INTERNAL_API bool ignores_hangup() noexcept;

/// Called by a Launch. Handles the signals from now on, whatever their disposition was, except that an ignored SIGHUP
/// (nohup) stays ignored. `terminate`: handle SIGTERM too.
MUSTER_INTERNAL_API void install_handlers(bool terminate) noexcept;

/// For a Launch in a program that may handle signals itself. While it lives, it handles those of SIGUSR1, SIGUSR2 and
/// SIGHUP that the program neither handles nor ignores; its destructor restores the previous handlers.
class MUSTER_INTERNAL_API ScopedHandlers {
 public:
  /// `mpi`: the file of MPI's library, whose own handler does not count as the program's: MPICH has one for SIGUSR1.
  explicit ScopedHandlers(const std::string& mpi) noexcept;
  ScopedHandlers(const ScopedHandlers&) = delete;
  ScopedHandlers& operator=(const ScopedHandlers&) = delete;
  ~ScopedHandlers();

 private:
  struct sigaction before_[3];
};

}  // namespace muster::detail::launch::stop_signal
