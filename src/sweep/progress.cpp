#include "sweep/progress.hpp"

#include "base/file.hpp"
#include "sweep/folder.hpp"
#include "train/failures.hpp"

namespace muster::detail::sweep {

int progress(const std::filesystem::path& folder) {
  int made = train::newest_index(folder);  // a run with the sweep's name may lie in the same folder
  if (!std::filesystem::exists(status_of(folder / table_file))) return made;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.path().filename().string().starts_with(trial_prefix)) continue;
    made += train::newest_index(entry.path()) + 1;
    if (const auto row = read_row(entry.path()); row && has_ended_well(row->status)) ++made;
  }
  return made;
}

}  // namespace muster::detail::sweep
