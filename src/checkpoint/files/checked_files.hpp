// Lists, copies and verifies the files of a checkpoint. All functions refuse symbolic links and special files, so
// nothing outside a checkpoint's directory is read or written.
#pragma once

#include "base/file.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"
#include "storage/tier.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {

class MappedState;

/// Returns the relative names of all files under `directory`, with "/" between their parts, sorted. Throws an Error
/// (ExitCode::data) for a symbolic link or a special file.
std::vector<std::string> list_files(const std::filesystem::path& directory);

/// Copies `directory`/`name` durably to the same name in the checkpoint that is being saved, and returns its checksums.
FileEntry copy_file(const std::filesystem::path& directory, const std::string& name, const storage::Tier& to,
                    int index);
/// Copies `directory`/`name` to the same name under `to`, and returns its checksums. Safe if several processes copy at
/// once: the file appears only when it is complete. An existing file with the same bytes stays. Throws an Error
/// (ExitCode::usage) if an existing file has other bytes.
FileEntry copy_file_unless_there(const std::filesystem::path& directory, const std::string& name,
                                 const std::filesystem::path& to);
/// Returns the checksums of `directory`/`name`.
FileEntry checksum_file(const std::filesystem::path& directory, const std::string& name);

/// Divides `count` items among as many threads as torch has. Each thread calls work(range).
void for_each_share(std::uint64_t count, const std::function<void(Range)>& work);

/// Opens a checkpoint's file for reading. Throws an Error (ExitCode::data) if its size is not that of its entry.
File open_with_size(const std::filesystem::path& directory, const FileEntry& entry);

/// Reads and verifies pieces of a checkpoint's file on as many threads as torch has, and passes each to `use` with its
/// range in the file. If place(range) returns memory, the piece is read into it. Throws an Error (ExitCode::data) if
/// the size of the file or the checksum of a piece is not that of the entry.
void read_pieces(const std::filesystem::path& directory, const FileEntry& entry, std::span<const std::uint64_t> pieces,
                 const std::function<std::byte*(Range)>& place = {},
                 const std::function<void(Range, std::span<const std::byte>)>& use = {});

/// Returns the pieces whose checksums match the entry. Throws the same Errors as read_pieces(), except for checksums.
std::vector<std::uint64_t> intact_pieces(const std::filesystem::path& directory, const FileEntry& entry,
                                         std::span<const std::uint64_t> pieces);

/// The path without symbolic links, whose targets may change; `path` itself if it has none or nothing is there.
std::filesystem::path without_links(const std::filesystem::path& path);
/// Device and inode of a folder, which it keeps under any name.
using FolderId = std::pair<std::uint64_t, std::uint64_t>;
/// Returns zeros if the folder cannot be looked at; then reading it says why.
FolderId folder_id(const std::filesystem::path& folder) noexcept;
/// Throws an Error (ExitCode::retry) if `folder` is not the one of this ID any more.
void require_same_folder(const std::filesystem::path& folder, const FolderId& id);

/// Throws an Error (ExitCode::data) that names the first file that is missing or has another size than the manifest
/// says.
void verify_sizes(const std::filesystem::path& directory, const Manifest& manifest);
/// Verifies the checksums of this rank's share. Pieces that every node needs are divided among the ranks of each node,
/// so they are in the node's page cache afterwards; all other pieces are divided among all ranks. With `state`,
/// state.h5 is read through its mapping.
void verify(const std::filesystem::path& directory, const Manifest& manifest, state::RankInGroup in_world = {},
            state::RankInGroup in_node = {}, const MappedState* state = nullptr);

/// Throws the Error for a piece with a wrong checksum.
[[noreturn]] void refuse_piece(const std::filesystem::path& path, Range range);

}  // namespace muster::detail::checkpoint
