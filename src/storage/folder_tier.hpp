// Tiers that are folders of a file system:
//
//   checkpoint_000003             published: intact unless the disk has damaged it
//   checkpoint_000003.damaged     set aside for inspection (.damaged.1 … if that name is taken); gets its name back if
//                                 it is found intact later
//   .checkpoint_000003.saving     a save under way, or interrupted
//   .checkpoint_000003.pruning    a removal under way, or interrupted
//   best → checkpoint_000003      a link: the name that a report gave the checkpoint; restoring does not need it
#pragma once

#include "base/export.hpp"
#include "storage/tier.hpp"

#include <sys/types.h>

#include <optional>
#include <string_view>

namespace muster::detail::storage {

/// A tier that is a folder of a file system.
class FolderTier : public Tier {
 public:
  using Tier::Tier;

  Listing list() const override;
  void begin(int index) override;
  void create(int index, const std::string& name, std::uint64_t bytes) const override;
  std::unique_ptr<SavedFile> open(int index, const std::string& name, Alignment alignment) const override;
  void publish(int index) const override;
  void abandon(int index) const noexcept override;
  std::filesystem::path quarantine(int index) const override;
  bool unquarantine(int index, const std::filesystem::path& damaged) const override;
  void remove(int index) const override;
  void remove_unfinished() const override;
  void set_name(int index, const std::string& name) const override;
  std::vector<std::string> names(int index) const override;
  void remove_name(const std::string& name) const noexcept override;

  /// Returns the folder in which a checkpoint is written until it is published.
  std::filesystem::path saving(int index) const;

 private:
  std::filesystem::path pruning(int index) const;
  Listing list_once() const;

  mode_t mode_ = 0;  // the permissions that the umask gives; set by begin(), used by publish()
};

/// The folder of one node of a fast tier. Its state.h5 has holes in place of the bytes that other nodes write.
class NodeTier : public FolderTier {
 public:
  using FolderTier::FolderTier;

  void create(int index, const std::string& name, std::uint64_t bytes) const override;
  /// Also removes the checkpoint if it is published: this node may have published it while another node has failed.
  void abandon(int index) const noexcept override;
};

/// Creates a file that is `bytes` long and has no content. If `with_space` is true, reserves disk space for a file
/// of 16 MiB or more.
MUSTER_INTERNAL_API void create_file(const std::filesystem::path& path, std::uint64_t bytes, bool with_space = true);
std::unique_ptr<SavedFile> open_file(const std::filesystem::path& path, Alignment alignment);

/// Returns the index in a name that begins like the name of a published checkpoint; empty for other names.
std::optional<int> leading_index(std::string_view name);
/// Syncs the folder and every folder under it.
void sync_folders(const std::filesystem::path& folder);
/// Removes the folder and everything in it. A failure only logs a warning.
void remove_folder(const std::filesystem::path& folder) noexcept;

}  // namespace muster::detail::storage
