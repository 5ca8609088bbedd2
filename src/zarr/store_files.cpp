#include "zarr/store_files.hpp"

#include "hdf5/codecs.hpp"
#include "hdf5/handle.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

namespace muster::detail::zarr {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  const bool is_link = error == ELOOP || error == ENOTDIR;
  throw Error(read_error_code(error), "reading " + path.string(),
              is_link ? "it is a link, or lies behind one or behind a file; links in a store are not followed"
                      : std::strerror(error),
              is_link ? "Put the data themselves there" : hdf5::retry_reading);
}

}  // namespace

StoredFile::StoredFile(std::shared_ptr<const File> file, const ZipRecord& record, std::uint64_t version,
                       std::string shown)
    : file_(std::move(file)), record_(record), version_(version), shown_(std::move(shown)) {
  constexpr std::uint64_t most_inflation = 1032;
  if (!record.stored && !record.deflated)
    throw Error(ExitCode::data, "reading " + shown_, "its record is neither stored nor deflated",
                "Store the files in the archive as they are, as zarr's ZipStore does");
  if (record.unpacked_bytes / most_inflation > record.bytes)
    throw Error(ExitCode::data, "reading " + shown_, "it announces more bytes than can be packed in it", damaged);
}

void StoredFile::read(std::span<std::byte> into, std::uint64_t offset) const {
  if (record_.stored) return file_->read_at(into, record_.offset + offset);
  if (offset > 0 || into.size() != record_.unpacked_bytes)
    throw Error(ExitCode::data, "reading " + shown_, "it is a shard that the archive compresses once more",
                "Store the files in the archive as they are, as zarr's ZipStore does");
  std::vector<std::byte> packed(record_.bytes);
  file_->read_at(packed, record_.offset);
  if (!hdf5::bare_decoder("deflate")(packed, into))
    throw Error(ExitCode::data, "reading " + shown_, "it does not unpack to the size that the archive announces",
                damaged);
}

void StoredFile::will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  file_->will_read(record_.offset + (record_.stored ? offset : 0), record_.stored ? bytes : record_.bytes);
}

StoreFiles::StoreFiles(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) {
    root_ = std::make_shared<const File>(path, ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
    if (root_->descriptor() < 0) fail(path, errno);
    return;
  }
  root_ = std::make_shared<const File>(path, File::Mode::read);
  records_ = read_zip_directory(*root_, /*may_repeat=*/true);
  if (!records_) throw Error(ExitCode::data, "opening " + path.string(), "it is not a whole zip archive", damaged);
}

std::vector<std::string> StoreFiles::list(const std::string& folder) const try {
  std::set<std::string> found;
  if (records_) {
    for (auto next = records_->lower_bound(folder); next != records_->end() && next->first.starts_with(folder);) {
      const auto end = next->first.find('/', folder.size());
      const bool is_file = end == std::string::npos;
      if (!is_file) found.insert(next->first.substr(folder.size(), end - folder.size()));
      next = is_file ? std::next(next) : records_->lower_bound(next->first.substr(0, end) + static_cast<char>('/' + 1));
    }
    std::erase_if(found, [](const auto& name) {
      return name.empty() || name == "." || name == ".." || name.find('\0') != name.npos;
    });
  } else {
    for (const auto& entry : std::filesystem::directory_iterator(root_->path() / folder))
      if (entry.is_symlink() || entry.is_directory()) found.insert(entry.path().filename());
  }
  return {found.begin(), found.end()};
} catch (const std::filesystem::filesystem_error& error) {
  fail(root_->path() / folder, error.code().value());
}

std::optional<StoredFile> StoreFiles::open(const std::string& name) const {
  if (records_) {
    const auto found = records_->find(name);
    if (found == records_->end()) return {};
    return StoredFile(root_, found->second, /*version=*/0, root_->path().string() + ":" + name);
  }
  auto file = std::make_shared<const File>(open_part_by_part(name));
  if (file->descriptor() < 0 && errno == ENOENT) return {};
  struct stat status {};
  if (file->descriptor() < 0 || ::fstat(file->descriptor(), &status) != 0) fail(file->path(), errno);
  if (!S_ISREG(status.st_mode))
    throw Error(ExitCode::data, "reading " + file->path().string(), "it is a folder or a device, and no file", damaged);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const auto& time = status.st_mtim;
  const auto version =
      (static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec)) ^
      static_cast<std::uint64_t>(status.st_ino) << 20 ^ size << 40;
  return StoredFile(file, {.bytes = size, .unpacked_bytes = size}, version, file->path().string());
}

/// Opens each folder in the name in turn, so that no link is followed. On failure, returns no descriptor and sets
/// errno.
File StoreFiles::open_part_by_part(const std::string& name) const {
  File opened(root_->path(), -1);
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = name.find('/', begin);
    const int how = end == std::string::npos ? O_RDONLY | O_NONBLOCK : O_PATH | O_DIRECTORY;  // a pipe would wait
    const int at = begin == 0 ? root_->descriptor() : opened.descriptor();
    File part(root_->path() / name,
              ::openat(at, name.substr(begin, end - begin).c_str(), how | O_NOFOLLOW | O_CLOEXEC));
    if (part.descriptor() < 0) return part;
    opened = std::move(part);
  }
  return opened;
}

}  // namespace muster::detail::zarr
