// The files of a checkpoint: found, copied with their checksums, verified. Symbolic links and special files are refused
// everywhere, so nothing outside a checkpoint's directory is read or written.
#pragma once

#include "checkpoint/manifest.hpp"
#include "checkpoint/pieces.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// All regular files under `directory`: relative names, parts separated by "/", sorted. An Error (ExitCode::data) for
/// a symbolic link or a special file.
std::vector<std::string> list_files(const std::filesystem::path& directory);

/// Copies `directory`/`name` to the same name under `to`, durably but for its folders; gives its checksums.
FileEntry copy_file(const std::filesystem::path& directory, const std::string& name, const std::filesystem::path& to);
/// The same without the copy.
FileEntry checksum_file(const std::filesystem::path& directory, const std::string& name);

/// Files are there and as long as the manifest says. An Error (ExitCode::data) names the first that is not.
void verify_sizes(const std::filesystem::path& directory, const Manifest& manifest);
/// The checksums of this part of all pieces, too.
void verify(const std::filesystem::path& directory, const Manifest& manifest, Part part);

/// Syncs `directory` and every folder under it.
void sync_folders(const std::filesystem::path& directory);

/// Removes what interrupted saves and removals have left in a run's directory.
void remove_leftovers(const std::filesystem::path& run);
/// Removes the directory and everything in it; a failure is only a warning.
void discard(const std::filesystem::path& directory) noexcept;

}  // namespace muster::detail::checkpoint
