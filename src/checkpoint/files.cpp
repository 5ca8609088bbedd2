#include "checkpoint/files.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/names.hpp"

#include <algorithm>
#include <optional>

namespace muster::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const fs::path& path, const std::string& fact, const char* remedy = "Use another checkpoint") {
  throw Error(ExitCode::data, "reading " + path.string(), fact, remedy);
}

/// `directory`/`name`, where nothing on the way is a symbolic link.
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

/// Reads the file piece by piece and gives its checksums; each piece goes to `copy` too.
FileEntry read_pieces(const fs::path& path, const std::string& name, File* copy) {
  const File file(path, File::Mode::read);
  FileEntry entry{.name = name, .bytes = file.size()};
  entry.piece_bytes = piece_bytes_for(entry.bytes);
  std::vector<std::byte> buffer(std::min(entry.piece_bytes, entry.bytes));
  const auto count = piece_count(entry.bytes, entry.piece_bytes);
  for (std::uint64_t piece = 0; piece < count; ++piece) {
    const auto range = piece_range(entry.bytes, entry.piece_bytes, piece);
    const auto bytes = std::span(buffer).first(range.end - range.begin);
    file.read_at(bytes, range.begin);
    if (copy != nullptr) copy->write_at(bytes, range.begin);
    entry.crc32.push_back(crc32(bytes));
  }
  return entry;
}

/// Opens the file and compares its size.
File open_whole(const fs::path& directory, const FileEntry& entry) {
  File file(regular_file(directory, entry.name), File::Mode::read);
  if (file.size() != entry.bytes)
    refuse(file.path(),
           "it has " + std::to_string(file.size()) + " bytes, and the manifest says " + std::to_string(entry.bytes));
  return file;
}

}  // namespace

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
    throw Error(code_of_reading(error.value()), "reading " + directory.string(), error.message(),
                "Check the path and the permissions");
  std::ranges::sort(names);
  return names;
}

FileEntry copy_file(const fs::path& directory, const std::string& name, const fs::path& to) {
  const auto target = to / name;
  const auto source = regular_file(directory, name);
  make_directories(target.parent_path());
  File copy(target, File::Mode::create);
  auto entry = read_pieces(source, name, &copy);
  copy.sync();
  copy.close();
  return entry;
}

FileEntry checksum_file(const fs::path& directory, const std::string& name) {
  return read_pieces(regular_file(directory, name), name, nullptr);
}

void verify_sizes(const fs::path& directory, const Manifest& manifest) {
  for (const auto& entry : manifest.files) open_whole(directory, entry);
}

void verify(const fs::path& directory, const Manifest& manifest, Part part) {
  verify_sizes(directory, manifest);
  std::uint64_t total = 0;
  for (const auto& entry : manifest.files) total += entry.crc32.size();
  const auto mine = share(total, part);
  std::vector<std::byte> buffer;
  std::uint64_t first = 0;
  for (const auto& entry : manifest.files) {
    const auto last = first + entry.crc32.size();
    const auto begin = std::max(first, mine.begin), end = std::min(last, mine.end);
    if (begin < end) {
      const auto file = open_whole(directory, entry);
      for (auto piece = begin - first; piece < end - first; ++piece) {
        const auto range = piece_range(entry.bytes, entry.piece_bytes, piece);
        buffer.resize(range.end - range.begin);
        file.read_at(buffer, range.begin);
        if (crc32(buffer) != entry.crc32[piece])
          refuse(file.path(), "bytes " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                                  " are damaged: their checksum is wrong");
      }
    }
    first = last;
  }
}

void sync_folders(const fs::path& directory) {
  std::error_code error;
  for (fs::recursive_directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
    if (status_of(at->path()).type() == fs::file_type::directory) sync_directory(at->path());
  if (error) throw Error(ExitCode::retry, "syncing " + directory.string(), error.message());
  sync_directory(directory);
}

void remove_leftovers(const fs::path& run) {
  for (const auto& leftover : find_checkpoints(run).leftovers) discard(leftover);
}

void discard(const fs::path& directory) noexcept {
  try {
    std::error_code error;
    fs::remove_all(directory, error);
    if (error) log::warn("removing " + directory.string() + ": " + error.message());
  } catch (...) {
    // Out of memory: what is left is removed when the run is opened again.
  }
}

}  // namespace muster::detail::checkpoint
