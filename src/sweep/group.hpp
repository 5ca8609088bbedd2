// What one group of ranks does in a sweep: trials, one after the other, as long as there are any.
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

/// What a sweep has to do, the same on all ranks.
struct Task {
  Launch& launch;
  const Trainable& trainable;
  const SweepOptions& options;
  std::filesystem::path folder = {};
  std::vector<Point> points = {};         ///< [trial]
  Json settings = {};                     ///< that all trials have alike; on rank 0 of the launch
  std::vector<Trial> trials = {};         ///< [trial]: as they were when the sweep was started
  std::vector<Losses> losses = {};        ///< [trial]
  std::vector<int> to_do = {};            ///< of them, in this order
  bool alone = false;                     ///< one at a time
  std::vector<std::int64_t> rungs = {};   ///< of the scheduler
  std::vector<Scores> scores = {};        ///< [rung]: when the sweep was started
  std::function<void()> refresh = [] {};  ///< brings the tables up to date; on rank 0 of the launch
};

/// The file in the sweep's folder by which groups ask each other to stop.
inline constexpr const char* stopping_file = ".stopping";
/// Never throws: who cannot ask stops alone.
void ask_others_to_stop(const std::filesystem::path& folder) noexcept;

/// Returns when there is no trial left, or the sweep is to stop. An error of a trial is in its row; what is thrown is
/// one of the sweep. `ranks` are a world of their own. Collective over them.
void run_trials(const Task& task, Board& board, const Communicator& ranks);

}  // namespace muster::detail::sweep
