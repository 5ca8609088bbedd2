// The user's own files in a checkpoint: each rank may report a checkpoint folder with files. If several ranks have a
// file of the same name, the lowest rank's file is stored.
#pragma once

#include "checkpoint/files/manifest.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// The files in one rank's folder.
struct UserFiles {
  std::vector<std::string> names;
  /// Metadata that the user has set in the folder by Checkpoint::set_metadata(); empty if it is not a JSON object.
  Json metadata = Json::object();
};

/// Lists the files in `directory`. If it is a checkpoint, muster's own files are left out. Throws an Error for a file
/// that a checkpoint cannot hold.
UserFiles list_user_files(const std::optional<std::filesystem::path>& directory);

/// Returns for each file name the lowest rank that has it. That rank copies the file. Throws an Error (ExitCode::usage)
/// if a name is a file on one rank and a folder on another.
std::map<std::string, int> owners_of(const std::vector<UserFiles>& ranks);

/// Returns `metadata`, updated with the metadata of all ranks' folders. If ranks differ, the lowest rank's value is
/// used.
Json merge_metadata(Json metadata, const std::vector<UserFiles>& ranks);

/// Returns the entry of each stored file, from the rank that copied it. Warns about each file that differs between
/// ranks. `ranks`: for each rank, the entries of its files.
std::vector<FileEntry> merge_files(const std::vector<std::vector<FileEntry>>& ranks);

}  // namespace muster::detail::checkpoint
