// Steps back: `--resume RUN/checkpoint_000003` makes the run go on from there and gives up those after it.
// RUN/steps_back.json keeps that, so that it is done once, and so that nothing goes on from what was given up:
//   [{"to": 3, "over": 5, "time": "2026-01-31T12:00:00Z"}, …]     oldest first; 4 and 5 are given up
#pragma once

#include "checkpoint/names.hpp"

#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

struct StepBack {
  int to = 0;
  int over = 0;  ///< the highest index that there was
};

/// Those of a run, none where it has no such file. An Error (ExitCode::data) if the file is damaged.
std::vector<StepBack> read_steps_back(const std::filesystem::path& run);
/// Adds one, durably.
void add_step_back(const std::filesystem::path& run, const StepBack& step);

/// Whether the checkpoint is not part of what led to the run as it stands now.
bool given_up(const std::vector<StepBack>& steps, int index) noexcept;

/// The newest published one that is not given up: index and path.
std::optional<std::pair<int, std::filesystem::path>> newest_of(const Found& found, const std::vector<StepBack>& steps);

}  // namespace muster::detail::checkpoint
