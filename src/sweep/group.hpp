// One group of ranks in a sweep: runs trials, one after the other, as long as there are any.
#pragma once

#include "muster/sweep.hpp"
#include "sweep/board.hpp"
#include "sweep/folder.hpp"
#include "sweep/space.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

namespace muster::detail::sweep {

/// The work of a sweep, the same on all ranks.
struct Task {
  Launch& launch;
  const Trainable& trainable;
  const SweepOptions& options;
  std::filesystem::path folder = {};
  std::vector<Point> points = {};         ///< [trial]
  Json settings = {};                     ///< the settings that all trials share; on rank 0 of the launch
  std::vector<Trial> trials = {};         ///< [trial]: their state when the sweep was started
  std::vector<Losses> losses = {};        ///< [trial]
  std::vector<int> to_do = {};            ///< the numbers of the trials to run, in this order
  bool alone = false;                     ///< true if only one trial runs at a time
  std::vector<std::int64_t> rungs = {};   ///< the scheduler's rungs
  std::vector<Scores> scores = {};        ///< [rung]: the scores when the sweep was started
  std::function<void()> refresh = [] {};  ///< updates the tables; on rank 0 of the launch
};

/// The file in the sweep's folder with which groups ask each other to stop.
inline constexpr const char* stopping_file = ".stopping";
/// Never throws: if the others cannot be asked, this group stops alone.
void ask_others_to_stop(const std::filesystem::path& folder) noexcept;

/// Returns when there is no trial left, or when the sweep should stop. An error of a trial is in its row; an exception
/// is an error of the sweep. `ranks` must be a separate world. Collective over them.
void run_trials(const Task& task, Board& board, const Communicator& ranks);

}  // namespace muster::detail::sweep
