// Watches one start of the job until it has ended.
#pragma once

#include "muster/supervise.hpp"
#include "supervise/decision.hpp"
#include "supervise/job.hpp"
#include "supervise/signals.hpp"
#include "supervise/terminal.hpp"

#include <functional>

namespace muster::detail::supervise {

/// Watches one start until it has ended and none of its processes is left. `should_grow` is called often. When it
/// returns true, the ranks save their state and stop, so that they can be started again on more hosts.
JobEnd watch(Job& job, const Launcher& launcher, Signals& signals, Terminal& terminal, const SuperviseOptions& options,
             const std::function<bool(const LauncherReport&)>& should_grow);

}  // namespace muster::detail::supervise
