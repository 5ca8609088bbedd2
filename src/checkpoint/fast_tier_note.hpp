// The note, fast_tier.json in the run's folder, lists the fast tiers. Only its owner may read it:
//   [{"folder": FOLDER, "id": ID, "hosts": ["n1", …], "used": true, "first": 3, "run": "INODE BIRTH"}, …]
// Oldest first; this job's tier is the last. Each start has its own tier with a random ID, so nobody can guess the
// folder's name. "used" is set before the first checkpoint is published in the tier. "first" is the index of the oldest
// checkpoint in the tier: that one, until a newer checkpoint has replaced it. "used" is cleared once the run's folder
// has a checkpoint at least as new. While a tier is in use, its entry in the note and its folders on the nodes stay, so
// a later start can still read a node that was missing. When it is not in use any more, its folders are removed; its
// entry stays until that is done on every node. Only files of this user are trusted: another user's note or folder is
// left alone, with a warning. In a copy of the run's folder INODE and BIRTH do not match. Such a copy takes only the
// checkpoint "first", the next one at the time of copying; it neither uses nor removes the tier.
//
// `run` is the tier of the run's folder. Nothing here is collective.
#pragma once

#include "storage/tier.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// An entry of the note.
struct NotedTier {
  std::string folder, id;
  std::vector<std::string> hosts = {};  ///< one for each node
  bool used = false;
  int first = 0;         ///< index of the oldest checkpoint in the tier
  std::string run = {};  ///< identity_of() the run's folder: tells it from its copies

  /// The prefix of the names of its folders.
  std::string prefix() const { return "muster-" + id + "-"; }
  std::string shown() const { return (std::filesystem::path(folder) / prefix()).string() + "*"; }
};

std::filesystem::path note_of(const storage::Tier& run);
/// Returns the entries; none if there is no note or it belongs to another user. Throws an Error (ExitCode::data) for a
/// note that does not name fast tiers.
std::vector<NotedTier> read_note(const storage::Tier& run);
/// Writes the note, or removes it if there are no entries.
void write_note(const storage::Tier& run, const std::vector<NotedTier>& note);
/// Returns the ID of a new tier.
std::string new_id();

/// Identifies the run's folder, to tell it from its copies: inode, and birth time if the file system has it. The device
/// number is left out because it may differ between hosts.
std::string identity_of(const storage::Tier& run);
/// True if this entry came with a copy of another run's folder, so that the tier belongs to that run. Also true if the
/// run's folder was moved to another file system.
bool is_of_another_run(const NotedTier& tier, const storage::Tier& run);
/// Returns the owner of the note if that is another user; empty if there is no note or it is this user's. The user to
/// whom the file system maps this one (root squash) counts as this user.
std::string other_owner(const storage::Tier& run);
/// Returns why this user must not trust the content of the folder; empty if it can be trusted.
std::string distrust(const std::filesystem::path& folder);

}  // namespace muster::detail::checkpoint
