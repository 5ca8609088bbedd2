// The user's own files in a checkpoint: what all ranks' folders hold; of a name that several give the lowest rank's.
#pragma once

#include "checkpoint/files/manifest.hpp"

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// What one rank gives.
struct UserFiles {
  std::vector<std::string> names;
  Json metadata = Json::object();  ///< set on the folder's checkpoint; none where a file of that name is no JSON object
};

/// An Error for what a checkpoint cannot hold. The state in a checkpoint is not a file of the user's.
UserFiles list_user_files(const std::optional<std::filesystem::path>& directory);

/// By name, the lowest rank that has the file: it copies it.
std::map<std::string, int> owners_of(const std::vector<UserFiles>& ranks);

/// `metadata` under that of the ranks, of which the lowest one's wins.
Json merge_metadata(Json metadata, const std::vector<UserFiles>& ranks);

/// The owners' entries of what each rank has copied or read; a warning for each file that differs between ranks.
std::vector<FileEntry> merge_files(const std::vector<std::vector<FileEntry>>& ranks);

}  // namespace muster::detail::checkpoint
