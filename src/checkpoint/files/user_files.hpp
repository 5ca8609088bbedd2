// The user's own files in a checkpoint: the files in all ranks' folders. If several ranks have a file of one name, the
// lowest rank's is stored.
#pragma once

#include "checkpoint/files/manifest.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// The files of one rank.
struct UserFiles {
  std::vector<std::string> names;
  Json metadata = Json::object();  ///< the metadata of the folder as a Checkpoint; empty if it is not a JSON object
};

/// Lists the files in `directory`. If that is a checkpoint, muster's own files in it are left out. Throws an Error for
/// a file that a checkpoint cannot hold.
UserFiles list_user_files(const std::optional<std::filesystem::path>& directory);

/// Returns for each file name the lowest rank that has it. That rank copies the file.
std::map<std::string, int> owners_of(const std::vector<UserFiles>& ranks);

/// Returns `metadata`, updated with the metadata of all ranks. The lowest rank's values win.
Json merge_metadata(Json metadata, const std::vector<UserFiles>& ranks);

/// Returns for each file the entry of its owner. Warns about each file that differs between ranks. `ranks`: the entries
/// of the files that each rank has.
std::vector<FileEntry> merge_files(const std::vector<std::vector<FileEntry>>& ranks);

}  // namespace muster::detail::checkpoint
