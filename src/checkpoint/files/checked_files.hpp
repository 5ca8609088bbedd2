// The files of a checkpoint: found, copied with their checksums, verified. Symbolic links and special files are refused
// everywhere, so nothing outside a checkpoint's directory is read or written.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"

#include <cstddef>
#include <filesystem>
#include <functional>
#include <span>
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

/// Reads those pieces of a checkpoint's file, in order, and gives each to `use`, with its range in the file. An Error
/// (ExitCode::data) where the file is not as long as its entry says, or a piece in `verified` has another checksum.
void read_pieces(const std::filesystem::path& directory, const FileEntry& entry, Range pieces, Range verified,
                 const std::function<void(Range, std::span<const std::byte>)>& use = {});

/// Files are there and as long as the manifest says. An Error (ExitCode::data) names the first that is not.
void verify_sizes(const std::filesystem::path& directory, const Manifest& manifest);
/// The checksums of this rank's share of all pieces, too.
void verify(const std::filesystem::path& directory, const Manifest& manifest, Rank here);

}  // namespace muster::detail::checkpoint
