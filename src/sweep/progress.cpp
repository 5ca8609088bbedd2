#include "sweep/progress.hpp"

#include "base/file.hpp"
#include "run/failures.hpp"
#include "sweep/folder.hpp"

namespace muster::detail::sweep {

run::RunPoints progress(const std::filesystem::path& folder) {
  auto points = run::points_of(folder);  // a run with the sweep's name is in this folder, too
  if (!std::filesystem::exists(status_of(folder / table_file))) return points;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with(trial_prefix)) continue;
    if (const auto point = run::point_of(entry.path())) points.emplace(name, *point);
    if (const auto row = read_trial(entry.path()); row && has_ended_well(row->status))
      points.emplace(name + " ended", run::RunPoint{});
  }
  return points;
}

}  // namespace muster::detail::sweep
