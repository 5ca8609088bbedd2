// A tier is a place where a run's checkpoints lie, today a folder of a file system. It defines their names there and
// the operations on a checkpoint as a whole. It knows neither ranks nor the content of a checkpoint.
//
//   checkpoint_000003             published: intact unless the disk has damaged it
//   checkpoint_000003.damaged     set aside for inspection (.damaged.1 … if that name is taken); gets its name back if
//                                 it is found intact later
//   .checkpoint_000003.saving     a save in progress, or interrupted
//   .checkpoint_000003.pruning    a removal in progress, or interrupted
//   best → checkpoint_000003      a name that a report gave it; not part of the protocol
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::storage {

class Tier {
 public:
  static constexpr int max_index = 999'999'999;

  /// The content of the folder. Names of any other form are ignored.
  struct Listing {
    std::map<int, std::filesystem::path> published;     ///< by index
    std::multimap<int, std::filesystem::path> damaged;  ///< by index
    std::vector<std::filesystem::path> unfinished;      ///< interrupted saves and removals
    std::vector<std::filesystem::path> others;          ///< links and files with the name of a published checkpoint
    std::set<int> indices;                              ///< of all of these: new checkpoints must not get them
  };

  explicit Tier(std::filesystem::path folder) : folder_(std::move(folder)) {}

  const std::filesystem::path& folder() const noexcept { return folder_; }
  std::filesystem::path published(int index) const;
  /// Returns the folder that the checkpoint is written to until it is published.
  std::filesystem::path saving(int index) const;
  /// Returns the index in the name of a published checkpoint; none if it is not such a name.
  static std::optional<int> index_of(const std::string& name);
  Listing list() const;

  /// Creates saving(index), accessible to this user only.
  void begin(int index);
  /// Makes the folders under saving(index) durable, sets the permissions that the umask asks for, and gives it its
  /// published name. The files in it must be durable already. Throws an Error if that name exists, or if something
  /// cannot be made durable; then the checkpoint is not published.
  void publish(int index) const;
  /// Removes saving(index), if it exists.
  void abandon(int index) const noexcept;

  /// Renames a published checkpoint to ….damaged, which readers ignore. Returns the new path.
  std::filesystem::path quarantine(int index) const;
  /// Gives a checkpoint that was set aside its published name back. Returns false if that name exists.
  bool unquarantine(int index, const std::filesystem::path& damaged) const;
  /// Makes the link `name` point to a published checkpoint, atomically, whether or not it exists already. Throws an
  /// Error (ExitCode::retry) if that fails, for example because a file or folder has the name.
  void link_name(const std::string& checkpoint, const std::string& name) const;
  /// Returns the links in the folder that point to a published checkpoint.
  std::vector<std::filesystem::path> links_to(int index) const;
  /// Removes a published checkpoint and its names. If the process is killed meanwhile, the checkpoint is still whole or
  /// is listed as unfinished.
  void remove(int index) const;
  void remove_unfinished() const;

 private:
  std::filesystem::path pruning(int index) const;

  std::filesystem::path folder_;
  mode_t mode_ = 0;  // permissions by the umask, for publish(); set by begin()
};

/// Syncs the folder and every folder under it.
void sync_folders(const std::filesystem::path& folder);
/// Removes the folder and everything in it. A failure only logs a warning.
void remove_folder(const std::filesystem::path& folder) noexcept;

}  // namespace muster::detail::storage
