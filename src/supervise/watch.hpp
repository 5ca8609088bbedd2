// Watches one start of the job, to its end.
#pragma once

#include "muster/supervise.hpp"
#include "supervise/decision.hpp"
#include "supervise/job.hpp"
#include "supervise/signals.hpp"
#include "supervise/terminal.hpp"

#include <functional>

namespace muster::detail::supervise {

/// One start, to its end: nothing of it is left then. `should_grow`: asked often; when it returns true, the ranks save
/// their state and stop, to be started again on more hosts.
JobEnd watch(Job& job, const Launcher& launcher, Signals& signals, Terminal& terminal, const SuperviseOptions& options,
             const std::function<bool(const LauncherReport&)>& should_grow);

}  // namespace muster::detail::supervise
