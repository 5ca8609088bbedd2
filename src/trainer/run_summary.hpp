// The text that is printed when a run is over.
#pragma once

#include "muster/config.hpp"
#include "muster/json.hpp"
#include "muster/result.hpp"

#include <string>

namespace muster::detail::trainer {

/// Returns lines, each with a line break and, except the last, of at most 80 columns: how the run has ended and how
/// long it took; for at most 12 metrics the last, lowest and highest value, with the number of the report; the speed of
/// training; what the time was spent on; the newest checkpoint, and, if `config` has a score, the best; the path of the
/// folder. `status`: the run's status.json, of which "time" is used; null if there is none. Empty if the run has no
/// report.
///
///   finished: 4 reports, 24 steps, 3 ranks, 2:05
///   metric             last    lowest (report)   highest (report)
///   accuracy          0.912            0.1 (1)          0.915 (3)
///   loss              0.031          0.029 (2)          1.234 (1)
///   812.3 samples/s
///   time: 93% useful, 4% data, 2% saves, 1% starting
///   3 checkpoints: the newest is checkpoint_000003,
///   the best checkpoint_000002 (loss 0.029)
///   runs/demo
std::string run_summary(const Result& result, const CheckpointConfig& config, const Json& status);

}  // namespace muster::detail::trainer
