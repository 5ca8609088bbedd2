#include "node/shared_segment.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::node {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // new in Linux 5.14; old C libraries do not define it
#endif

constexpr const char* sharing = "sharing memory among the ranks of this node";

[[noreturn]] void fail(const char* call, int error) {
  throw Error(ExitCode::retry, sharing, str(call, ": ", std::strerror(error)),
              "Make /dev/shm larger (--shm-size of a container), and look at the limits of this machine (ulimit -a)");
}

/// The segments that this process maps, so that a child of fork() can replace them by private copies.
class Mappings {
 public:
  /// Maps `file` as shared memory, at an address that the kernel chooses.
  static std::byte* map(int file, std::size_t bytes) {
    auto& all = the();
    const std::lock_guard lock(all.mutex_);
    all.mappings_.reserve(all.mappings_.size() + 1);
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (address == MAP_FAILED) fail("mmap", errno);
    all.mappings_.push_back({static_cast<std::byte*>(address), bytes, file});
    return all.mappings_.back().data;
  }
  static void unmap(std::byte* data) noexcept {
    auto& all = the();
    const std::lock_guard lock(all.mutex_);
    const auto mapping = std::ranges::find(all.mappings_, data, &Mapping::data);
    if (mapping == all.mappings_.end()) return;
    ::munmap(data, mapping->bytes);
    all.mappings_.erase(mapping);
  }

 private:
  struct Mapping {
    std::byte* data;
    std::size_t bytes;
    int file;
    bool is_private = false;  ///< true in a child of fork() once it has been replaced
  };

  Mappings() {
    ::pthread_atfork([] { the().mutex_.lock(); }, [] { the().mutex_.unlock(); },
                     [] {
                       the().make_private();
                       the().mutex_.unlock();
                     });
  }
  static Mappings& the() {
    static auto* const all = new Mappings;  // never destroyed, since segments may be destroyed at exit
    return *all;
  }

  /// Runs in the child, where only system calls are allowed. A mapping that cannot be replaced is unmapped: the child
  /// had better crash there than write to the memory of other processes.
  void make_private() noexcept {
    for (auto& [data, bytes, file, is_private] : mappings_) {
      if (std::exchange(is_private, true)) continue;
      if (::mmap(data, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED)
        ::munmap(data, bytes);
    }
  }

  std::mutex mutex_;
  std::vector<Mapping> mappings_;
};

constexpr std::string_view prefix = "muster.";
constexpr std::size_t random_digits = 32;

std::string random_name() {
  std::array<unsigned char, random_digits / 2> random{};
  if (::getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) fail("getrandom", errno);
  std::string name = str("/", prefix);
  for (const auto byte : random) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

}  // namespace

std::size_t spare_shared_memory() noexcept {
  struct statfs found {};
  if (::statfs("/dev/shm", &found) != 0) return 0;
  const auto kept = (found.f_blocks + 3) / 4;
  return found.f_bavail > kept ? (found.f_bavail - kept) * static_cast<std::size_t>(found.f_bsize) : 0;
}

SharedSegment SharedSegment::create(std::size_t bytes) {
  SharedSegment segment;
  segment.name_ = random_name();
  segment.file_ = ::shm_open(segment.name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (segment.file_ < 0) fail("shm_open", errno);
  segment.has_name_ = true;
  segment.lock();
  if (::ftruncate(segment.file_, static_cast<off_t>(bytes)) != 0) fail("ftruncate", errno);
  segment.map(bytes);
  return segment;
}

SharedSegment SharedSegment::open(const std::string& name, std::size_t bytes) {
  SharedSegment segment;
  segment.name_ = name;
  segment.file_ = ::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (segment.file_ < 0) fail("shm_open", errno);
  segment.lock();
  segment.map(bytes);
  return segment;
}

void SharedSegment::lock() {
  int result = 0;
  do {
    result = ::flock(file_, LOCK_SH);
  } while (result != 0 && errno == EINTR);
  if (result != 0) fail("flock", errno);
}

void SharedSegment::remove_leftovers() noexcept {
  constexpr time_t old_enough = 60;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/dev/shm"), ::closedir);
  if (!folder) return;
  while (const auto* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (!name.starts_with(prefix) || name.size() != prefix.size() + random_digits) continue;
    const int file = ::openat(::dirfd(folder.get()), entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) continue;
    struct stat found {};
    const bool candidate = ::fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == ::geteuid() &&
                           ::time(nullptr) - found.st_mtime > old_enough;
    // Names are never reused, so this name still belongs to the segment that is locked.
    if (candidate && ::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlinkat(::dirfd(folder.get()), entry->d_name, 0);
    ::close(file);
  }
}

void SharedSegment::map(std::size_t bytes) {
  data_ = Mappings::map(file_, bytes);
  size_ = bytes;
  // A hint for huge pages, used if /dev/shm is mounted with huge=advise.
  ::madvise(data_, size_, MADV_HUGEPAGE);
}

void SharedSegment::reserve(std::size_t first, std::size_t bytes) {
  if (bytes == 0) return;
  // If a huge page fits, let the kernel touch the pages (Linux 5.14): posix_fallocate() does not follow the hint.
  if (bytes >= huge_page) {
    const auto begin = first / page_size() * page_size();
    if (::madvise(data_ + begin, first + bytes - begin, MADV_POPULATE_WRITE) == 0) return;
    if (errno != EINVAL) fail("madvise", errno == EFAULT ? ENOSPC : errno);
  }
  int error = 0;
  do {
    error = ::posix_fallocate(file_, static_cast<off_t>(first), static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) fail("posix_fallocate", error);
}

void SharedSegment::discard(std::size_t first, std::size_t bytes) noexcept {
  ::madvise(data_ + first, bytes, MADV_REMOVE);
}

std::shared_ptr<std::byte> SharedSegment::private_view(std::size_t first, std::size_t bytes) const {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file_, static_cast<off_t>(first));
  if (address == MAP_FAILED) fail("mmap", errno);
  return {static_cast<std::byte*>(address), [bytes](std::byte* view) { ::munmap(view, bytes); }};
}

void SharedSegment::drop_private_pages(std::byte* first, std::size_t bytes) {
  if (::madvise(first, bytes, MADV_DONTNEED) != 0) fail("madvise", errno);
}

void SharedSegment::unlink() noexcept {
  if (std::exchange(has_name_, false)) ::shm_unlink(name_.c_str());
}

SharedSegment::SharedSegment(SharedSegment&& other) noexcept { *this = std::move(other); }

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(has_name_, other.has_name_);
  std::swap(file_, other.file_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

SharedSegment::~SharedSegment() {
  unlink();
  if (data_ != nullptr) Mappings::unmap(data_);
  if (file_ >= 0) ::close(file_);
}

std::shared_ptr<std::byte> local_memory(std::size_t bytes) {
  const auto size = whole_pages(std::max<std::size_t>(1, bytes));
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), [size](std::byte* data) { ::munmap(data, size); }};
}

}  // namespace muster::detail::node
