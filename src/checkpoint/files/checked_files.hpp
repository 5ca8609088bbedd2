// The files of a checkpoint: found, copied with their checksums, verified. Symbolic links and special files are refused
// everywhere, so nothing outside a checkpoint's directory is read or written.
#pragma once

#include "base/file.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

class MappedState;

/// All regular files under `directory`: relative names, parts separated by "/", sorted. An Error (ExitCode::data) for
/// a symbolic link or a special file.
std::vector<std::string> list_files(const std::filesystem::path& directory);

/// Copies `directory`/`name` to the same name under `to`, durably but for its folders; gives its checksums.
FileEntry copy_file(const std::filesystem::path& directory, const std::string& name, const std::filesystem::path& to);
/// The same where several processes may copy at once: the file appears when it is whole, and one that is there with the
/// same bytes stays. An Error (ExitCode::usage) if it has others.
void copy_file_unless_there(const std::filesystem::path& directory, const std::string& name,
                            const std::filesystem::path& to);
/// The same without the copy.
FileEntry checksum_file(const std::filesystem::path& directory, const std::string& name);

/// Divides so many items among as many threads as torch has, each of which calls work(range).
void on_threads(std::uint64_t count, const std::function<void(Range)>& work);

/// Opens a checkpoint's file for reading. An Error (ExitCode::data) where it is not as long as its entry says.
File open_whole(const std::filesystem::path& directory, const FileEntry& entry);

/// Reads those pieces of a checkpoint's file on as many threads as torch has, and gives each to `use`, with its range
/// in the file; where place(range) gives memory they are read into it. An Error (ExitCode::data) where the file is not
/// as long as its entry says, or a piece has another checksum.
void read_pieces(const std::filesystem::path& directory, const FileEntry& entry, std::span<const std::uint64_t> pieces,
                 const std::function<std::byte*(Range)>& place = {},
                 const std::function<void(Range, std::span<const std::byte>)>& use = {});

/// Those of the pieces that have the checksum of their entry. An Error as of read_pieces(), but for other checksums.
std::vector<std::uint64_t> whole_pieces(const std::filesystem::path& directory, const FileEntry& entry,
                                        std::span<const std::uint64_t> pieces);

/// Files are there and as long as the manifest says. An Error (ExitCode::data) names the first that is not.
void verify_sizes(const std::filesystem::path& directory, const Manifest& manifest);
/// The checksums of this rank's share: what every node needs is divided among the ranks of each, which then find
/// it in their node's cache, and all else among all ranks. state.h5 through its mapping, where there is one.
void verify(const std::filesystem::path& directory, const Manifest& manifest, Rank in_world = {}, Rank in_node = {},
            const MappedState* state = nullptr);

/// The Error for a piece of a file with a wrong checksum.
[[noreturn]] void refuse_piece(const std::filesystem::path& path, Range range);

}  // namespace muster::detail::checkpoint
