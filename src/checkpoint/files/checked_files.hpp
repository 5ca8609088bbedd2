// Lists, copies and verifies the files of a checkpoint. Symbolic links and special files in it are refused, so nothing
// outside a checkpoint's directory is read or written.
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

/// Copies `directory`/`name` durably to the same name in the hidden folder of the checkpoint `index`, which is being
/// saved to the tier `to`. Returns the file's size and checksums.
FileEntry copy_file(const std::filesystem::path& directory, const std::string& name, const storage::Tier& to,
                    int index);
/// Copies `directory`/`name` to the same name under `to`, and returns its size and checksums. Several processes may
/// copy at once: the file appears only when it is complete. Throws an Error (ExitCode::usage) if there already is a
/// file with other bytes; a file with the same bytes stays.
FileEntry copy_file_unless_there(const std::filesystem::path& directory, const std::string& name,
                                 const std::filesystem::path& to);
/// Returns the size and checksums of `directory`/`name`.
FileEntry checksum_file(const std::filesystem::path& directory, const std::string& name);

/// Divides `count` items into at most as many shares as torch has threads, and calls work(range) for each share, on
/// several threads.
void for_each_share(std::uint64_t count, const std::function<void(Range)>& work);

/// Opens a checkpoint's file for reading. Throws an Error (ExitCode::data) if it is missing, is not a regular file or
/// has another size than the entry says.
File open_with_size(const std::filesystem::path& directory, const FileEntry& entry);

/// Reads and verifies pieces of a checkpoint's file, on at most as many threads as torch has. These threads call `use`
/// for each piece with its range in the file and its bytes. If place(range) returns memory, the piece is read into that
/// memory. Throws an Error (ExitCode::data) if the file's size or a piece's checksum differs from the entry.
void read_pieces(const std::filesystem::path& directory, const FileEntry& entry, std::span<const std::uint64_t> pieces,
                 const std::function<std::byte*(Range)>& place = {},
                 const std::function<void(Range, std::span<const std::byte>)>& use = {});

/// Returns the pieces whose checksums match the entry. Throws the same Errors as read_pieces(), but not for wrong
/// checksums.
std::vector<std::uint64_t> intact_pieces(const std::filesystem::path& directory, const FileEntry& entry,
                                         std::span<const std::uint64_t> pieces);

/// Returns the path with symbolic links resolved, since links may change; `path` itself if it has no links or nothing
/// is there.
std::filesystem::path without_links(const std::filesystem::path& path);
/// Device and inode of a folder, which do not change when it is renamed.
using FolderId = std::pair<std::uint64_t, std::uint64_t>;
/// Returns zeros if the folder cannot be examined; a later read of the folder reports the error.
FolderId folder_id(const std::filesystem::path& folder) noexcept;
/// Throws an Error (ExitCode::retry) if the path `folder` now leads to a folder with another ID. Does not throw if
/// either ID is unknown (zeros).
void require_same_folder(const std::filesystem::path& folder, const FolderId& id);

/// Throws an Error (ExitCode::data) for the first file that open_with_size() refuses.
void verify_sizes(const std::filesystem::path& directory, const Manifest& manifest);
/// Verifies the checksums of this rank's share of the files. Pieces that every rank will read are divided among the
/// ranks of each node, so that each node's page cache has them; all other pieces are divided among all ranks. With
/// `state`, state.h5 is read through that mapping.
void verify(const std::filesystem::path& directory, const Manifest& manifest, state::RankInGroup in_world = {},
            state::RankInGroup in_node = {}, const MappedState* state = nullptr);

/// Throws the Error for a piece with a wrong checksum.
[[noreturn]] void refuse_piece(const std::filesystem::path& path, Range range);

}  // namespace muster::detail::checkpoint
