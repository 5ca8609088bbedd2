// One thread for the process that advances operations for which nobody waits, so that they end during other work. MPI
// and the node's shared memory advance an operation only in calls of this process. Needs MPI_THREAD_MULTIPLE.
#pragma once

#include "base/export.hpp"

#include <functional>
#include <mutex>

namespace muster::detail::comm {

/// Each World calls it, before the other functions here are called. From then on this process notices MPI_Finalize()
/// and that it is a child of fork(); the thread ends before MPI does, and a child has none. A second call does nothing.
void prepare_progress();

/// Throws an Error (ExitCode::usage) once MPI is finalised, or in a child of fork(). Its text begins with `doing` and
/// `operation`.
void require_progress(const char* doing, const char* operation);
/// True in a child of fork(): it must call no MPI, and must leave shared memory alone.
bool is_forked() noexcept;

/// Held by the thread while it advances an operation. Other threads that share operations with this one also lock it to
/// start and advance them. Do not wait for other threads while you hold it.
std::mutex& operation_mutex() noexcept;
/// True once end_progress() was called, as by MPI_Finalize(). Stays as it is while the caller holds operation_mutex().
bool has_progress_ended() noexcept;

struct Advanced {
  bool is_over = false;             ///< true if the operation needs no more calls
  std::function<void()> then = {};  ///< called and destroyed without the mutex
};

/// Makes the thread call `advance` with operation_mutex() locked, again and again, until the operation is over.
/// `advance` must not throw. The first use starts the thread, which sleeps while there is nothing to advance. It also
/// sleeps between two rounds while the caller's thread computes, if cores do not suffice, or if nothing has ended for
/// 200 ms. Returns false, and does nothing, if MPI does not allow several threads or the thread has ended.
bool advance_in_background(std::function<Advanced()> advance);

/// Ends the thread for good: from now on operations advance only where they are waited for. Local; any thread.
MUSTER_INTERNAL_API void end_progress() noexcept;

}  // namespace muster::detail::comm
