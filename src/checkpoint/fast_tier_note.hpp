// The note, fast_tier.json in the run's folder, lists the fast tiers. Only its owner may read it:
//   [{"folder": FOLDER, "id": ID, "hosts": ["n1", …], "used": true, "first": 3, "run": "INODE BIRTH"}, …]
// The oldest entry comes first; this job's tier is the last. Each start has its own tier with a random ID, so nobody
// can guess the folder's name.
// "used" is set before a checkpoint is published in the tier, and cleared when the run's folder has a checkpoint at
// least as new. As long as it is set, the entry and the tier's folders on the nodes stay, so a later start can read a
// node that was missing. When it is cleared, the folders of an earlier job's tier are removed; the entry stays until
// they are gone on every node.
// "first" is the index of the oldest checkpoint in the tier. That checkpoint stays there until "first" names a newer
// one or the run's folder has a copy.
// Only files of this user are trusted. A note or folder of another user is left alone, with a warning.
// "run" identifies the run's folder by its inode and birth time, which do not fit a copy of the folder. A start in such
// a copy takes only checkpoint "first" from the tier: the one that was to be copied next when somebody copied the
// folder. It saves nothing to the tier and does not remove it.
//
// `run` is always the tier of the run's folder. Nothing here is collective.
#pragma once

#include "storage/tier.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// An entry of the note.
struct NotedTier {
  std::string folder, id;
  std::vector<std::string> hosts = {};  ///< one host for each node
  bool used = false;
  int first = 0;         ///< index of the oldest checkpoint in the tier
  std::string run = {};  ///< identity_of() the run's folder when the entry was made

  /// Returns the beginning of the names of the tier's folders.
  std::string prefix() const { return "muster-" + id + "-"; }
  std::string shown() const { return (std::filesystem::path(folder) / prefix()).string() + "*"; }
};

std::filesystem::path note_path(const storage::Tier& run);
/// Returns the entries; none if there is no note or it belongs to another user. Throws an Error (ExitCode::data) if the
/// file is not such a note.
std::vector<NotedTier> read_note(const storage::Tier& run);
/// Writes the note, or removes it if there are no entries.
void write_note(const storage::Tier& run, const std::vector<NotedTier>& note);
/// Returns a random ID for a new tier.
std::string new_id();

/// Identifies the run's folder, to tell it from its copies: inode, and birth time if the file system has it. The device
/// number is left out because it may differ between hosts.
std::string identity_of(const storage::Tier& run);
/// True if the entry was made for another folder, so the run's folder is a copy and the tier belongs to the other run.
/// Also true if the run's folder was moved to another file system.
bool is_of_another_run(const NotedTier& tier, const storage::Tier& run);
/// Returns the name of the note's owner if that is another user; empty if there is no note or it belongs to this user.
/// If the file system maps this user to another one (root squash), the other one counts as this user.
std::string other_owner(const storage::Tier& run);
/// Returns why this user must not trust the content of the folder; empty if it can be trusted.
std::string reason_to_distrust(const std::filesystem::path& folder);

}  // namespace muster::detail::checkpoint
