#include "checkpoint/files/user_files.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "muster/checkpoint.hpp"

#include <ranges>

namespace muster::detail::checkpoint {

UserFiles list_user_files(const std::optional<std::filesystem::path>& directory) {
  UserFiles files;
  if (!directory) return files;
  const auto doing = "saving the files of " + directory->string();
  const auto is_ours = [](const std::string& name) {
    return name == manifest_name || name == state_name || name == validation_name;
  };
  const auto top_of = [](const std::string& name) { return name.substr(0, name.find('/')); };
  files.names = list_files(*directory);
  if (is_checkpoint(*directory)) std::erase_if(files.names, is_ours);
  if (const auto ours = std::ranges::find_if(files.names, is_ours, top_of); ours != files.names.end())
    throw Error(ExitCode::usage, doing,
                str("it holds a ", is_ours(*ours) ? "file " : "folder ", top_of(*ours),
                    ", a name that muster uses in checkpoints"),
                "Rename it");
  if (const auto odd = std::ranges::find_if_not(files.names, is_utf8); odd != files.names.end())
    throw Error(ExitCode::usage, doing, "the name of the file " + json_text_lossy(Json(*odd)) + " is not UTF-8",
                "Rename it");
  try {
    if (auto set = Checkpoint::from_directory(*directory).get_metadata(); set.is_object())
      files.metadata = std::move(set);
  } catch (const Error&) {
    // The folder has a file of the name under which set_metadata() stores metadata, but the file holds something else.
    // It is stored like the other files.
  }
  return files;
}

std::map<std::string, int> owners_of(const std::vector<UserFiles>& ranks) {
  std::map<std::string, int> owners;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& name : ranks[rank].names) owners.try_emplace(name, static_cast<int>(rank));
  for (const auto& [name, rank] : owners)
    if (const auto inside = owners.lower_bound(name + "/");
        inside != owners.end() && inside->first.starts_with(name + "/"))
      throw Error(ExitCode::usage, "saving the files of all workers",
                  str(name, " is a file of rank ", rank, " and a folder of rank ", inside->second),
                  "Rename one of them");
  return owners;
}

Json merge_metadata(Json metadata, const std::vector<UserFiles>& ranks) {
  for (const auto& rank : ranks | std::views::reverse) {
    if (rank.metadata.empty()) continue;
    if (!metadata.is_object()) metadata = Json::object();
    metadata.update(rank.metadata);
  }
  return metadata;
}

std::vector<FileEntry> merge_files(const std::vector<std::vector<FileEntry>>& ranks) {
  std::map<std::string, std::pair<std::size_t, FileEntry>> kept;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& file : ranks[rank]) {
      const auto& [owner, first] = kept.try_emplace(file.name, rank, file).first->second;
      if (first.bytes != file.bytes || first.piece_checksums != file.piece_checksums)
        log::warn(str("saving ", file.name, ": rank ", rank, " gives other contents than rank ", owner,
                      "; those of rank ", owner, " are kept"));
    }
  std::vector<FileEntry> files;
  for (auto& [name, owned] : kept) files.push_back(std::move(owned.second));
  return files;
}

}  // namespace muster::detail::checkpoint
