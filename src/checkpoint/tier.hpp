// Where the checkpoints of a run lie: their names there, and all that is done with a whole one. Today this is a folder
// on a file system that all ranks share. A tier knows neither ranks nor what a checkpoint holds.
//
//   checkpoint_000003             published, whole unless the disk has damaged it
//   checkpoint_000003.damaged     set aside for whoever wants to look (.damaged.1 … where that name is taken), and
//                                 taken back when it is found whole again
//   .checkpoint_000003.saving     a save under way, or interrupted
//   .checkpoint_000003.pruning    a removal under way, or interrupted
//   best → checkpoint_000003      a name that a report has given it; no part of the protocol
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

class Tier {
 public:
  /// What stands there. Names of any other form are not ours and not here.
  struct Listing {
    std::map<int, std::filesystem::path> published;  ///< by index
    std::multimap<int, std::filesystem::path> damaged;
    std::vector<std::filesystem::path> unfinished;  ///< interrupted saves and removals
    std::vector<std::filesystem::path> others;      ///< links and files with the name of a published checkpoint
    int next_index = 0;                             ///< above all of them
  };

  explicit Tier(std::filesystem::path folder) : folder_(std::move(folder)) {}

  const std::filesystem::path& folder() const noexcept { return folder_; }
  std::filesystem::path published(int index) const;
  /// Where the checkpoint is written until it is published.
  std::filesystem::path saving(int index) const;
  /// The index in a published checkpoint's name; none if it is not such a name.
  static std::optional<int> index_of(const std::string& name);
  Listing list() const;

  /// Makes saving(index), for this user alone.
  void begin(int index);
  /// Makes all that is in saving(index) durable but for the files, opens it as the umask wants, and gives it its name,
  /// which is never taken from another. What cannot be made durable is not published.
  void publish(int index) const;
  /// Removes saving(index), if it is there.
  void abandon(int index) const noexcept;

  /// Gives a published checkpoint a name that readers ignore: the new one.
  std::filesystem::path set_aside(int index) const;
  /// Gives what was set aside its name back; false if there is another of that name.
  bool take_back(int index, const std::filesystem::path& damaged) const;
  /// Makes `name` a link to a published checkpoint, or moves it there, at once. An Error (ExitCode::retry) if it cannot
  /// be, as where something else is called so.
  void give_name(const std::string& checkpoint, const std::string& name) const;
  /// The links in the folder that lead to a published checkpoint.
  std::vector<std::filesystem::path> names_of(int index) const;
  /// Removes a published checkpoint and its names; a kill leaves all of it, or something unfinished.
  void remove(int index) const;
  void remove_unfinished() const;

 private:
  std::filesystem::path pruning(int index) const;

  std::filesystem::path folder_;
  mode_t mode_ = 0;  // of the umask, for what has begun
};

/// Syncs the folder and every folder under it.
void sync_folders(const std::filesystem::path& folder);
/// Removes the folder and everything in it; a failure is only a warning.
void remove_folder(const std::filesystem::path& folder) noexcept;

}  // namespace muster::detail::checkpoint
