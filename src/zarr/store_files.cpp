#include "zarr/store_files.hpp"

#include "base/zip.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/handle.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
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

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const noexcept { return number_; }
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_;
};

class FolderFile final : public StoredFile {
 public:
  FolderFile(Descriptor file, std::filesystem::path path) : file_(std::move(file)), path_(std::move(path)) {
    if (::fstat(file_.get(), &status_) != 0) fail(path_, errno);
    if (!S_ISREG(status_.st_mode))
      throw Error(ExitCode::data, "reading " + path_.string(), "it is a folder or a device, and no file", damaged);
  }
  std::uint64_t size() const override { return static_cast<std::uint64_t>(status_.st_size); }
  void read(std::span<std::byte> into, std::uint64_t offset) const override {
    while (!into.empty()) {
      const auto got = ::pread(file_.get(), into.data(), into.size(), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(path_, errno);
      if (got == 0) throw Error(ExitCode::data, "reading " + path_.string(), "it became shorter meanwhile", damaged);
      into = into.subspan(static_cast<std::size_t>(got));
      offset += static_cast<std::uint64_t>(got);
    }
  }
  void will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept override {
    ::posix_fadvise(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
  }
  std::uint64_t version() const override {
    const auto& time = status_.st_mtim;
    return (static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec)) ^
           static_cast<std::uint64_t>(status_.st_ino) << 20 ^ size() << 40;
  }

 private:
  Descriptor file_;
  std::filesystem::path path_;
  struct stat status_ {};
};

class Folder final : public StoreFiles {
 public:
  explicit Folder(std::filesystem::path path)
      : path_(std::move(path)), root_(::open(path_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
    if (root_.get() < 0) fail(path_, errno);
  }

  std::vector<Entry> list(const std::string& folder) const override {
    std::vector<Entry> entries;
    auto opened = open_at(folder.empty() ? "." : folder.substr(0, folder.size() - 1), O_RDONLY | O_DIRECTORY);
    if (opened.get() < 0) fail(path_ / folder, errno);
    const std::unique_ptr<DIR, int (*)(DIR*)> names(::fdopendir(opened.get()), ::closedir);
    if (!names) fail(path_ / folder, errno);
    opened.release();
    while (const auto* entry = ::readdir(names.get())) {
      const std::string name = entry->d_name;
      struct stat status {};
      if (name == "." || name == ".." ||
          ::fstatat(::dirfd(names.get()), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
        continue;
      if (S_ISDIR(status.st_mode) || S_ISLNK(status.st_mode)) entries.push_back({name, S_ISLNK(status.st_mode)});
    }
    std::ranges::sort(entries, {}, &Entry::name);
    return entries;
  }

  std::unique_ptr<StoredFile> open(const std::string& name) const override {
    auto file = open_at(name, O_RDONLY | O_NONBLOCK);  // without which a pipe would be waited for
    if (file.get() < 0 && errno == ENOENT) return {};
    if (file.get() < 0) fail(path_ / name, errno);
    return std::make_unique<FolderFile>(std::move(file), path_ / name);
  }

  std::optional<std::uint64_t> size_of(const std::string& name) const override {
    const auto file = open_at(name, O_PATH);
    struct stat status {};
    if (file.get() < 0 && errno == ENOENT) return {};
    if (file.get() < 0 || ::fstat(file.get(), &status) != 0) fail(path_ / name, errno);
    if (S_ISLNK(status.st_mode)) fail(path_ / name, ELOOP);
    return static_cast<std::uint64_t>(status.st_size);
  }

 private:
  /// Opens part by part, so that no link is followed. Negative, with errno, if that fails.
  Descriptor open_at(const std::string& name, int flags) const {
    Descriptor folder(-1);
    std::size_t begin = 0;
    for (auto end = name.find('/'); end != std::string::npos; begin = end + 1, end = name.find('/', begin)) {
      const auto part = name.substr(begin, end - begin);
      folder = Descriptor(::openat(begin == 0 ? root_.get() : folder.get(), part.c_str(),
                                   O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      if (folder.get() < 0) return folder;
    }
    return Descriptor(
        ::openat(begin == 0 ? root_.get() : folder.get(), name.c_str() + begin, flags | O_NOFOLLOW | O_CLOEXEC));
  }

  std::filesystem::path path_;
  Descriptor root_;
};

/// A record of a zip archive. One that is deflated is read whole.
class ZipFile final : public StoredFile {
 public:
  ZipFile(const File& file, const ZipRecord& record, const std::string& name)
      : file_(file), record_(record), shown_(file.path().string() + ":" + name) {
    constexpr std::uint64_t most_inflation = 1032;
    if (!record.stored && !record.deflated)
      throw Error(ExitCode::data, "reading " + shown_, "its record is neither stored nor deflated",
                  "Store the files in the archive as they are, as zarr's ZipStore does");
    if (record.unpacked_bytes / most_inflation > record.bytes)
      throw Error(ExitCode::data, "reading " + shown_, "it announces more bytes than can be packed in it", damaged);
  }

  std::uint64_t size() const override { return record_.unpacked_bytes; }
  void read(std::span<std::byte> into, std::uint64_t offset) const override {
    if (record_.stored) return file_.read_at(into, record_.offset + offset);
    if (offset > 0 || into.size() != record_.unpacked_bytes)
      throw Error(ExitCode::data, "reading " + shown_, "it is a shard that the archive compresses once more",
                  "Store the files in the archive as they are, as zarr's ZipStore does");
    std::vector<std::byte> packed(record_.bytes);
    file_.read_at(packed, record_.offset);
    if (!hdf5::inflate(hdf5::Deflated::bare, packed, into))
      throw Error(ExitCode::data, "reading " + shown_, "it does not unpack to the size that the archive announces",
                  damaged);
  }
  void will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept override {
    file_.will_read(record_.offset + (record_.stored ? offset : 0), record_.stored ? bytes : record_.bytes);
  }
  std::uint64_t version() const override { return 0; }

 private:
  const File& file_;
  ZipRecord record_;
  std::string shown_;
};

class Zip final : public StoreFiles {
 public:
  explicit Zip(const std::filesystem::path& path) : file_(path, File::Mode::read) {
    auto records = read_zip_directory(file_, /*may_repeat=*/true);
    if (!records) throw Error(ExitCode::data, "opening " + path.string(), "it is not a whole zip archive", damaged);
    records_ = std::move(*records);
  }

  std::vector<Entry> list(const std::string& folder) const override {
    std::vector<Entry> entries;
    for (auto next = records_.lower_bound(folder); next != records_.end() && next->first.starts_with(folder);) {
      const auto end = next->first.find('/', folder.size());
      if (end == std::string::npos) {
        ++next;
        continue;
      }
      const auto name = next->first.substr(folder.size(), end - folder.size());
      if (!name.empty() && name != "." && name != "..") entries.push_back({name});
      next = records_.lower_bound(next->first.substr(0, end) + static_cast<char>('/' + 1));
    }
    // A name that another one begins with may stand between the records of a folder.
    std::ranges::sort(entries, {}, &Entry::name);
    const auto [twice, end] = std::ranges::unique(entries, {}, &Entry::name);
    entries.erase(twice, end);
    return entries;
  }
  std::unique_ptr<StoredFile> open(const std::string& name) const override {
    const auto found = records_.find(name);
    if (found == records_.end()) return {};
    return std::make_unique<ZipFile>(file_, found->second, name);
  }
  std::optional<std::uint64_t> size_of(const std::string& name) const override {
    const auto found = records_.find(name);
    return found == records_.end() ? std::nullopt : std::optional(found->second.unpacked_bytes);
  }

 private:
  File file_;
  std::map<std::string, ZipRecord> records_;
};

}  // namespace

std::optional<std::string> StoreFiles::text_of(const std::string& name) const {
  constexpr std::uint64_t most = 64 << 20;
  const auto file = open(name);
  if (!file) return {};
  if (file->size() > most)
    throw Error(ExitCode::data, "reading " + name, "it has more than 64 MiB, and metadata are short", damaged);
  std::string text(file->size(), '\0');
  file->read(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

std::shared_ptr<const StoreFiles> open_store_files(const std::filesystem::path& path) {
  if (std::filesystem::is_directory(path)) return std::make_shared<Folder>(path);
  return std::make_shared<Zip>(path);
}

}  // namespace muster::detail::zarr
