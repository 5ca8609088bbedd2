// The names of checkpoints in a run's directory:
//   checkpoint_000003             published, whole unless the disk has damaged it
//   checkpoint_000003.damaged     found damaged; kept for whoever wants to look (.damaged.1 … where that name is
//   taken),
//                                 and taken back when it is found whole again
//   .checkpoint_000003.saving     a save under way, or interrupted
//   .checkpoint_000003.pruning    a removal under way, or interrupted
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

std::string published_name(int index);
std::string saving_name(int index);
std::string pruning_name(int index);

/// The index in a published checkpoint's name; none if it is not such a name.
std::optional<int> index_of(const std::string& name);

/// What stands in a run's directory. Symbolic links and names of any other form are not ours and not here.
struct Found {
  std::map<int, std::filesystem::path> published;  ///< by index
  std::multimap<int, std::filesystem::path> damaged;
  std::vector<std::filesystem::path> leftovers;  ///< of interrupted saves and removals
  int next_index = 0;                            ///< above all of them
};

Found find_checkpoints(const std::filesystem::path& run);

/// Renames it so that readers ignore it; gives the new name.
std::filesystem::path set_aside(const std::filesystem::path& checkpoint);

}  // namespace muster::detail::checkpoint
