#include "zarr/store_files.hpp"

#include "hdf5/codecs.hpp"
#include "hdf5/handle.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
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

class Folder final : public StoreFiles {
 public:
  explicit Folder(const std::filesystem::path& path)
      : root_(path, ::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
    if (root_.descriptor() < 0) fail(path, errno);
  }

  std::vector<std::string> list(const std::string& folder) const override {
    std::vector<std::string> found;
    const auto opened = open_at(folder + ".", O_RDONLY | O_DIRECTORY);
    const int copy = opened.descriptor() < 0 ? -1 : ::fcntl(opened.descriptor(), F_DUPFD_CLOEXEC, 0);
    const std::unique_ptr<DIR, int (*)(DIR*)> names(copy < 0 ? nullptr : ::fdopendir(copy), ::closedir);
    if (!names) fail(opened.path(), errno);
    while (const auto* entry = ::readdir(names.get())) {
      const std::string name = entry->d_name;
      struct stat status {};
      if (name != "." && name != ".." &&
          ::fstatat(opened.descriptor(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
          (S_ISDIR(status.st_mode) || S_ISLNK(status.st_mode)))
        found.push_back(name);
    }
    std::ranges::sort(found);
    return found;
  }

  std::optional<StoredFile> open(const std::string& name) const override {
    auto file = std::make_shared<const File>(open_at(name, O_RDONLY | O_NONBLOCK));  // without it a pipe would wait
    if (file->descriptor() < 0 && errno == ENOENT) return {};
    struct stat status {};
    if (file->descriptor() < 0 || ::fstat(file->descriptor(), &status) != 0) fail(file->path(), errno);
    if (!S_ISREG(status.st_mode))
      throw Error(ExitCode::data, "reading " + file->path().string(), "it is a folder or a device, and no file",
                  damaged);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    const auto& time = status.st_mtim;
    const auto version =
        (static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec)) ^
        static_cast<std::uint64_t>(status.st_ino) << 20 ^ size << 40;
    return StoredFile(file, {.bytes = size, .unpacked_bytes = size}, version, file->path().string());
  }

 private:
  /// Opens part by part, so that no link is followed. Without a descriptor, with errno, if that fails.
  File open_at(const std::string& name, int flags) const {
    File folder(root_.path(), -1);
    std::size_t begin = 0;
    const auto open_part = [&](const std::string& part, int how) {
      return File(root_.path() / name, ::openat(begin == 0 ? root_.descriptor() : folder.descriptor(), part.c_str(),
                                                how | O_NOFOLLOW | O_CLOEXEC));
    };
    for (auto end = name.find('/'); end != std::string::npos; begin = end + 1, end = name.find('/', begin)) {
      folder = open_part(name.substr(begin, end - begin), O_PATH | O_DIRECTORY);
      if (folder.descriptor() < 0) return folder;
    }
    return open_part(name.substr(begin), flags);
  }

  const File root_;
};

class Zip final : public StoreFiles {
 public:
  explicit Zip(const std::filesystem::path& path) : file_(std::make_shared<const File>(path, File::Mode::read)) {
    auto records = read_zip_directory(*file_, /*may_repeat=*/true);
    if (!records) throw Error(ExitCode::data, "opening " + path.string(), "it is not a whole zip archive", damaged);
    records_ = std::move(*records);
  }

  std::vector<std::string> list(const std::string& folder) const override {
    std::set<std::string> found;
    for (auto next = records_.lower_bound(folder); next != records_.end() && next->first.starts_with(folder);) {
      const auto end = next->first.find('/', folder.size());
      const bool is_file = end == std::string::npos;
      if (!is_file) found.insert(next->first.substr(folder.size(), end - folder.size()));
      next = is_file ? std::next(next) : records_.lower_bound(next->first.substr(0, end) + static_cast<char>('/' + 1));
    }
    std::erase_if(found, [](const auto& name) {
      return name.empty() || name == "." || name == ".." || name.find('\0') != name.npos;
    });
    return {found.begin(), found.end()};
  }

  std::optional<StoredFile> open(const std::string& name) const override {
    const auto found = records_.find(name);
    if (found == records_.end()) return {};
    return StoredFile(file_, found->second, /*version=*/0, file_->path().string() + ":" + name);
  }

 private:
  std::shared_ptr<const File> file_;
  std::map<std::string, ZipRecord> records_;
};

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
  if (!hdf5::inflate(hdf5::Deflated::bare, packed, into))
    throw Error(ExitCode::data, "reading " + shown_, "it does not unpack to the size that the archive announces",
                damaged);
}

void StoredFile::will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  file_->will_read(record_.offset + (record_.stored ? offset : 0), record_.stored ? bytes : record_.bytes);
}

std::shared_ptr<const StoreFiles> open_store_files(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return std::make_shared<Folder>(path);
  return std::make_shared<Zip>(path);
}

}  // namespace muster::detail::zarr
