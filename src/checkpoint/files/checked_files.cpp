#include "checkpoint/files/checked_files.hpp"

#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "checkpoint/files/state_reader.hpp"

#include <ATen/Parallel.h>
#include <isa-l/crc.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <utility>

namespace muster::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const std::string& fact, const char* remedy = "Use another checkpoint") {
  throw Error(ExitCode::data, "reading " + path.string(), fact, remedy);
}

/// Returns `directory`/`name`. Refuses a path with a symbolic link below `directory`, and anything but a regular file.
fs::path regular_file(const fs::path& directory, const std::string& name) {
  auto path = directory;
  fs::file_status status;
  for (const auto& part : fs::path(name)) {
    path /= part;
    status = status_of(path);
    if (fs::is_symlink(status)) refuse(path, "it is a symbolic link");
    if (!fs::exists(status)) refuse(path, "the file is missing");
  }
  if (!fs::is_regular_file(status)) refuse(path, "it is not a regular file");
  return path;
}

/// Bytes per read: few enough to be in the processor's cache still when their checksum is computed.
constexpr std::size_t read_block_bytes = 256 << 10;

/// Fills `into` from the file, beginning at `offset`, and returns the checksum of what was read.
std::uint32_t read_with_checksum(const File& file, std::uint64_t offset, std::span<std::byte> into) {
  std::uint32_t checksum = 0;
  while (!into.empty()) {
    const auto block = into.first(std::min(into.size(), read_block_bytes));
    file.read_at(block, offset);
    checksum = piece_checksum(block, checksum);
    offset += block.size();
    into = into.subspan(block.size());
  }
  return checksum;
}

/// Computes the checksums of the pieces in a file's first `size` bytes. Calls `use` with the bytes of each piece and
/// their offset.
FileEntry take_checksums(const File& file, std::uint64_t size, const std::string& name,
                         const std::function<void(std::span<const std::byte>, std::uint64_t offset)>& use = {}) {
  FileEntry entry{.name = name, .bytes = size, .piece_bytes = piece_bytes_for(size)};
  std::vector<std::byte> buffer(std::min(entry.piece_bytes, entry.bytes));
  for (std::uint64_t piece = 0; piece < piece_count(entry.bytes, entry.piece_bytes); ++piece) {
    const auto range = piece_range(entry.bytes, entry.piece_bytes, piece);
    const auto bytes = std::span(buffer).first(range.end - range.begin);
    entry.piece_checksums.push_back(read_with_checksum(file, range.begin, bytes));
    if (use) use(bytes, range.begin);
  }
  return entry;
}

}  // namespace

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return ::crc32_gzip_refl(before, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

void for_each_share(std::uint64_t count, const std::function<void(Range)>& work) {
  const auto threads = static_cast<int>(std::clamp<std::uint64_t>(count, 1, at::get_num_threads()));
  ThreadPool("muster-share", threads - 1).run(static_cast<std::size_t>(threads), [&](std::size_t thread) {
    work(share_of(count, {static_cast<int>(thread), threads}));
  });
}

File open_with_size(const fs::path& directory, const FileEntry& entry) {
  File file(regular_file(directory, entry.name), File::Mode::read);
  if (file.size() != entry.bytes)
    refuse(file.path(), str("it has ", file.size(), " bytes, and the manifest says ", entry.bytes));
  return file;
}

std::vector<std::string> list_files(const fs::path& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::recursive_directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) {
    const auto status = status_of(at->path());
    if (fs::is_directory(status)) continue;
    if (!fs::is_regular_file(status))
      refuse(at->path(), fs::is_symlink(status) ? "it is a symbolic link" : "it is a special file",
             "A checkpoint holds regular files only");
    names.push_back(at->path().lexically_relative(directory).generic_string());
  }
  if (error)
    throw Error(read_error_code(error.value()), "reading " + directory.string(), error.message(),
                "Check the path and the permissions");
  std::ranges::sort(names);
  return names;
}

FileEntry checksum_file(const fs::path& directory, const std::string& name) {
  const File file(regular_file(directory, name), File::Mode::read);
  return take_checksums(file, file.size(), name);
}

FileEntry copy_file(const fs::path& directory, const std::string& name, const storage::Tier& to, int index) {
  const File source(regular_file(directory, name), File::Mode::read);
  const auto size = source.size();
  to.create(index, name, size);
  const auto copy = to.open(index, name, storage::Alignment::any);
  auto entry = take_checksums(source, size, name, [&](auto bytes, auto offset) { copy->write_at(bytes, offset); });
  copy->finish();
  return entry;
}

FileEntry copy_file_unless_there(const fs::path& directory, const std::string& name, const fs::path& to) {
  const auto target = to / name, source = regular_file(directory, name);
  make_directories(target.parent_path());
  FileEntry copied;
  const auto is_there = [&] {
    if (!fs::exists(status_of(target))) return false;
    copied = checksum_file(directory, name);
    const auto there = checksum_file(to, name);
    if (there.bytes != copied.bytes || there.piece_checksums != copied.piece_checksums)
      throw Error(ExitCode::usage, "copying " + source.string() + " to " + target.string(),
                  "another file of that name is there", "Give an empty folder, or a new one");
    return true;
  };
  if (is_there()) return copied;
  try {
    detail::write_file(
        target,
        [&](File& copy) {
          const File file(source, File::Mode::read);
          copied =
              take_checksums(file, file.size(), name, [&](auto bytes, auto offset) { copy.write_at(bytes, offset); });
        },
        /*replace=*/false);
  } catch (const Error&) {
    if (!is_there()) throw;  // if it is there, another process has copied it first
  }
  return copied;
}

fs::path without_links(const fs::path& path) {
  std::error_code error;
  auto target = fs::canonical(path, error);
  // If the path has no symbolic links, it is returned as given.
  return error || target == fs::absolute(path, error).lexically_normal() ? path : target;
}

FolderId folder_id(const fs::path& folder) noexcept {
  struct stat status {};
  if (::stat(folder.c_str(), &status) != 0) return {};
  return {status.st_dev, status.st_ino};
}

void require_same_folder(const fs::path& folder, const FolderId& id) {
  const auto now = folder_id(folder);
  if (now != id && now != FolderId() && id != FolderId())
    throw Error(ExitCode::retry, "reading the checkpoint " + folder.string(), "another folder has its name now",
                "Open it again");
}

void read_pieces(const fs::path& directory, const FileEntry& entry, std::span<const std::uint64_t> pieces,
                 const std::function<std::byte*(Range)>& place,
                 const std::function<void(Range, std::span<const std::byte>)>& use) {
  if (pieces.empty()) return;
  const auto file = open_with_size(directory, entry);
  for_each_share(pieces.size(), [&](Range mine) {
    std::vector<std::byte> buffer(std::min(entry.piece_bytes, entry.bytes));
    for (const auto piece : pieces.subspan(mine.begin, mine.end - mine.begin)) {
      const auto range = piece_range(entry.bytes, entry.piece_bytes, piece);
      auto* const there = place ? place(range) : nullptr;
      const std::span bytes(there != nullptr ? there : buffer.data(), range.end - range.begin);
      if (read_with_checksum(file, range.begin, bytes) != entry.piece_checksums[piece])
        refuse_piece(file.path(), range);
      if (use) use(range, bytes);
    }
  });
}

std::vector<std::uint64_t> intact_pieces(const fs::path& directory, const FileEntry& entry,
                                         std::span<const std::uint64_t> pieces) {
  if (pieces.empty()) return {};
  const auto file = open_with_size(directory, entry);
  std::vector<char> is_whole(pieces.size());  // not vector<bool>: threads write to neighbouring elements
  for_each_share(pieces.size(), [&](Range mine) {
    std::vector<std::byte> buffer(std::min(entry.piece_bytes, entry.bytes));
    for (auto i = mine.begin; i < mine.end; ++i) {
      const auto range = piece_range(entry.bytes, entry.piece_bytes, pieces[i]);
      const auto bytes = std::span(buffer).first(range.end - range.begin);
      is_whole[i] = read_with_checksum(file, range.begin, bytes) == entry.piece_checksums[pieces[i]];
    }
  });
  std::vector<std::uint64_t> whole;
  for (std::size_t i = 0; i < pieces.size(); ++i)
    if (is_whole[i] != 0) whole.push_back(pieces[i]);
  return whole;
}

void refuse_piece(const fs::path& path, Range range) {
  refuse(path, str("bytes ", range.begin, " to ", range.end, " are damaged: their checksum is wrong"));
}

void verify_sizes(const fs::path& directory, const Manifest& manifest) {
  for (const auto& entry : manifest.files) open_with_size(directory, entry);
}

void verify(const fs::path& directory, const Manifest& manifest, state::RankInGroup in_world,
            state::RankInGroup in_node, const MappedState* state) {
  const TensorIndex tensor_index(manifest.tensors);
  const auto needed_on_every_node = [&](const FileEntry& entry, std::uint64_t piece) {
    bool needed = false;
    if (entry.name == state_name)
      tensor_index.for_each_segment(
          piece_range(entry.bytes, entry.piece_bytes, piece),
          [&](Range, const TensorEntry* tensor) { needed = needed || (tensor != nullptr && !tensor->per_rank); });
    return needed;
  };
  std::vector<std::pair<const FileEntry*, std::uint64_t>> of_node, of_world;
  for (const auto& entry : manifest.files)
    for (std::uint64_t piece = 0; piece < entry.piece_checksums.size(); ++piece)
      (needed_on_every_node(entry, piece) ? of_node : of_world).emplace_back(&entry, piece);
  std::map<const FileEntry*, std::vector<std::uint64_t>> mine;
  for (const auto& [all, here] : {std::pair(&of_node, in_node), std::pair(&of_world, in_world)}) {
    const auto part = share_of(all->size(), here);
    for (auto i = part.begin; i < part.end; ++i) mine[(*all)[i].first].push_back((*all)[i].second);
  }
  for (const auto& entry : manifest.files)
    state != nullptr&& entry.name == state_name ? state->verify(mine[&entry])
                                                : read_pieces(directory, entry, mine[&entry]);
}

}  // namespace muster::detail::checkpoint
