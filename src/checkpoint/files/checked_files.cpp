#include "checkpoint/files/checked_files.hpp"

#include "base/file.hpp"

#include <zlib.h>

#include <algorithm>

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

/// Reads those pieces of the file, one after the other, and calls use(number, range, bytes) for each.
void each_piece(const File& file, const FileEntry& entry, Range pieces, auto&& use) {
  std::vector<std::byte> buffer(std::min(entry.piece_bytes, entry.bytes));
  for (auto piece = pieces.begin; piece < pieces.end; ++piece) {
    const auto range = piece_range(entry.bytes, entry.piece_bytes, piece);
    const auto bytes = std::span(buffer).first(range.end - range.begin);
    file.read_at(bytes, range.begin);
    use(piece, range, std::span<const std::byte>(bytes));
  }
}

/// The checksums of a file; each piece goes to `copy` too.
FileEntry take_checksums(const fs::path& path, const std::string& name, File* copy) {
  const File file(path, File::Mode::read);
  FileEntry entry{.name = name, .bytes = file.size(), .piece_bytes = piece_bytes_for(file.size())};
  each_piece(file, entry, {0, piece_count(entry.bytes, entry.piece_bytes)},
             [&](std::uint64_t, Range range, auto bytes) {
               if (copy != nullptr) copy->write_at(bytes, range.begin);
               entry.crc32.push_back(crc32(bytes));
             });
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

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return static_cast<std::uint32_t>(::crc32_z(before, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
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
    throw Error(code_of_reading(error.value()), "reading " + directory.string(), error.message(),
                "Check the path and the permissions");
  std::ranges::sort(names);
  return names;
}

FileEntry checksum_file(const fs::path& directory, const std::string& name) {
  return take_checksums(regular_file(directory, name), name, nullptr);
}

FileEntry copy_file(const fs::path& directory, const std::string& name, const fs::path& to) {
  const auto target = to / name, source = regular_file(directory, name);
  make_directories(target.parent_path());
  File copy(target, File::Mode::create);
  auto entry = take_checksums(source, name, &copy);
  copy.sync();
  copy.close();
  return entry;
}

void read_pieces(const fs::path& directory, const FileEntry& entry, Range pieces, Range verified,
                 const std::function<void(Range, std::span<const std::byte>)>& use) {
  const auto file = open_whole(directory, entry);
  each_piece(file, entry, pieces, [&](std::uint64_t piece, Range range, auto bytes) {
    if (piece >= verified.begin && piece < verified.end && crc32(bytes) != entry.crc32[piece])
      refuse(file.path(), "bytes " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                              " are damaged: their checksum is wrong");
    if (use) use(range, bytes);
  });
}

void verify_sizes(const fs::path& directory, const Manifest& manifest) {
  for (const auto& entry : manifest.files) open_whole(directory, entry);
}

void verify(const fs::path& directory, const Manifest& manifest, Rank here) {
  verify_sizes(directory, manifest);
  std::uint64_t total = 0, first = 0;
  for (const auto& entry : manifest.files) total += entry.crc32.size();
  const auto mine = share(total, here);
  for (const auto& entry : manifest.files) {
    const auto last = first + entry.crc32.size();
    if (const Range range{std::max(first, mine.begin), std::min(last, mine.end)}; range.begin < range.end) {
      const Range pieces{range.begin - first, range.end - first};
      read_pieces(directory, entry, pieces, pieces);
    }
    first = last;
  }
}

}  // namespace muster::detail::checkpoint
