#include "base/file.hpp"

#include "base/direct.hpp"
#include "base/host.hpp"
#include "base/printable.hpp"
#include "muster/error.hpp"

#include <fcntl.h>
#include <pwd.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>

namespace muster::detail {
namespace {

[[noreturn]] void fail(ExitCode code, const char* doing, const std::filesystem::path& path, int error) {
  throw Error(code == ExitCode::data ? read_error_code(error) : code, str(doing, " ", path),
              error == ELOOP && code == ExitCode::retry ? "it is a symbolic link, and links are not written through"
                                                        : std::strerror(error),
              remedy_of(error));
}

int open_checked(const std::filesystem::path& path, int flags, ExitCode code, const char* doing) {
  int descriptor;
  do descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) fail(code, doing, path, errno);
  return descriptor;
}

void write_all(int descriptor, const std::filesystem::path& path, std::span<const std::byte> from,
               const std::uint64_t* offset) {
  std::uint64_t at = offset ? *offset : 0;
  bool may_be_direct = offset != nullptr;
  while (!from.empty()) {
    const auto wrote = offset ? ::pwrite(descriptor, from.data(), from.size(), static_cast<off_t>(at))
                              : ::write(descriptor, from.data(), from.size());
    if (wrote < 0) {
      if (errno == EINTR) continue;
      // EINVAL: the file system refuses direct writes after all, or a full disk has cut the last write inside a block,
      // so that the rest is not aligned. Then write through the cache.
      if (errno == EINVAL && std::exchange(may_be_direct, false)) {
        write_through_cache(descriptor);
        continue;
      }
      fail(ExitCode::retry, "writing", path, errno);
    }
    if (wrote == 0) fail(ExitCode::retry, "writing", path, ENOSPC);
    from = from.subspan(static_cast<std::size_t>(wrote));
    at += static_cast<std::uint64_t>(wrote);
  }
}

/// fsync(2), repeated if a signal interrupts it, since an interruption is no write error.
int sync_descriptor(int descriptor) noexcept {
  int status;
  do status = ::fsync(descriptor);
  while (status != 0 && errno == EINTR);
  return status;
}

/// Returns the beginning of the names of temporary files for `path`. A long name is cut, so that the whole name has at
/// most 255 bytes.
std::string temporary_prefix(const std::filesystem::path& path) {
  constexpr std::size_t longest_kept = 200;
  return path.filename().string().substr(0, longest_kept) + ".tmp.";
}

/// A hash of this host's name.
std::uint32_t host_hash() noexcept { return static_cast<std::uint32_t>(std::hash<std::string>()(host_name())); }

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// The exit code for a failed mkdir(2): usage if the path is at fault, since a retry does not help then.
ExitCode mkdir_error_code(int error) noexcept {
  return error == EEXIST || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG ? ExitCode::usage
                                                                                        : ExitCode::retry;
}

/// Throws the caught error again. If it has ExitCode::retry and names the temporary file, it names `path` instead.
[[noreturn]] void rethrow_for(const std::filesystem::path& path, const std::filesystem::path& temporary,
                              const Error& error) {
  const std::string text = error.what(), name = printable(temporary.string()) + ": ";
  const auto at = text.find(name);
  if (at == std::string::npos || error.code() != ExitCode::retry) throw;
  throw Error(ExitCode::retry, text.substr(0, at) + path.string(), text.substr(at + name.size()));
}

const char* kind_of(std::filesystem::file_type type) noexcept {
  using enum std::filesystem::file_type;
  return type == directory ? "a folder"
         : type == symlink ? "a symbolic link"
         : type == fifo    ? "a pipe"
         : type == socket  ? "a socket"
                           : "a device";
}

/// True if a process with that id runs on this machine.
bool is_running(const std::string& process) noexcept {
  return ::kill(static_cast<pid_t>(std::atoi(process.c_str())), 0) == 0 || errno != ESRCH;
}

/// True if the process that made a temporary file may still write it: on this host, if it runs; on another host, if the
/// file was written to in the last 24 hours. `numbers`: the name after the prefix, which has the process id, the hash
/// of the host and two more numbers. In files of earlier versions of muster it has only the process id.
bool may_be_written(const std::filesystem::path& file, const std::string& numbers) {
  const auto dot = numbers.find('.');
  const bool has_host = std::ranges::count(numbers, '.') == 3;
  if (!has_host || std::strtoul(numbers.c_str() + dot + 1, nullptr, 10) == host_hash()) return is_running(numbers);
  std::error_code error;
  const auto written = std::filesystem::last_write_time(file, error);
  return error || std::filesystem::file_time_type::clock::now() - written < std::chrono::hours(24);
}

/// The name that a folder has while replace_directory() puts another one in its place without exchanging names.
std::filesystem::path replaced_name(std::filesystem::path path) { return path += ".replaced"; }

std::string user_of(uid_t id) {
  const passwd* const user = ::getpwuid(id);
  return user != nullptr ? user->pw_name : str("user ", id);
}

}  // namespace

File::File(const std::filesystem::path& path, Mode mode) : path_(path) {
  switch (mode) {
    case Mode::read:
      // Without O_NONBLOCK, opening a pipe without a writer would wait for ever.
      descriptor_ = open_checked(path, O_RDONLY | O_NONBLOCK, ExitCode::data, "opening");
      require_file();
      break;
    case Mode::write:
      descriptor_ = open_checked(path, O_RDWR | O_NOFOLLOW, ExitCode::retry, "opening");
      break;
    case Mode::create:
      descriptor_ = open_checked(path, O_RDWR | O_CREAT | O_EXCL, ExitCode::retry, "creating");
      break;
    case Mode::append:
      descriptor_ = open_checked(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW, ExitCode::retry, "opening");
      break;
  }
}

void File::require_file() {
  struct stat status {};
  const int error = ::fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (error == 0 && S_ISREG(status.st_mode)) return;
  ::close(std::exchange(descriptor_, -1));
  if (error != 0) fail(read_error_code(error), "opening", path_, error);
  if (S_ISDIR(status.st_mode)) fail(ExitCode::data, "opening", path_, EISDIR);
  throw Error(ExitCode::data, "opening " + path_.string(), "it is no regular file", "Name a file");
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::uint64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail(ExitCode::data, "reading the size of", path_, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::read_at(std::span<std::byte> into, std::uint64_t offset) const {
  while (!into.empty()) {
    const auto got = ::pread(descriptor_, into.data(), into.size(), static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      fail(ExitCode::data, "reading", path_, errno);
    }
    if (got == 0)
      throw Error(ExitCode::data, "reading " + path_.string(), str("the file is truncated: it ends at byte ", offset),
                  "Make or copy it anew");
    into = into.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

void File::will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept {
  ::posix_fadvise(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

void File::write_at(std::span<const std::byte> from, std::uint64_t offset) {
  write_all(descriptor_, path_, from, &offset);
}

void File::append(std::string_view text) { write_all(descriptor_, path_, std::as_bytes(std::span(text)), nullptr); }

void File::truncate(std::uint64_t size) {
  int status;
  do status = ::ftruncate(descriptor_, static_cast<off_t>(size));
  while (status != 0 && errno == EINTR);
  if (status != 0) fail(ExitCode::retry, "truncating", path_, errno);
}

void File::sync() {
  if (sync_descriptor(descriptor_) != 0) fail(ExitCode::retry, "syncing", path_, errno);
}

void File::close() {
  // Linux frees the descriptor even if close() fails, so never close it twice.
  if (const int descriptor = std::exchange(descriptor_, -1);
      descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR)
    fail(ExitCode::retry, "closing", path_, errno);
}

const char* remedy_of(int error) noexcept {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "Make room there, or choose another path";
    case EACCES:
    case EPERM:
    case EROFS:
      return "Check the permissions, or choose another path";
    case ENOENT:
      return "Check the path";
    case EISDIR:
      return "Name a file";
    case ELOOP:
      return "Remove it, or choose another path";
    case EIO:
    case ESTALE:
    case ETIMEDOUT:
      return "Check the disk or the file server, then try again";
    case EMFILE:
    case ENFILE:
      return "Raise the limit of open files (ulimit -n), then try again";
    default:
      return "";
  }
}

ExitCode read_error_code(int error) noexcept {
  constexpr std::array of_the_path{ENOENT, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG};
  return std::ranges::find(of_the_path, error) != of_the_path.end() ? ExitCode::data : ExitCode::retry;
}

std::filesystem::file_status status_of(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::symlink_status(path, error);
  if (status.type() != std::filesystem::file_type::none) return status;
  fail(ExitCode::data, "looking at", path, error.value());
}

std::string read_file(const std::filesystem::path& path, std::uint64_t most) {
  const File file(path, File::Mode::read);
  const auto size = file.size();
  if (size > most)
    throw Error(ExitCode::data, "reading " + path.string(), str("it is absurdly large: ", size, " bytes"),
                "Use another file");
  std::string content(size, '\0');
  file.read_at(std::as_writable_bytes(std::span(content)), 0);
  return content;
}

std::filesystem::path temporary_beside(std::filesystem::path path) {
  // Processes in other containers may have the same process id, so the name also has a random number.
  static const auto random = std::random_device{}();
  static std::atomic<int> count{0};
  const auto text = [](auto number) { return std::to_string(number); };
  return path.replace_filename(temporary_prefix(path) + text(::getpid()) + "." + text(host_hash()) + "." +
                               text(random) + "." + text(count++));
}

void write_file(const std::filesystem::path& path, std::string_view content) {
  write_file(path, [&](File& file) { file.append(content); });
}

void write_file(const std::filesystem::path& path, const std::function<void(File&)>& write, bool replace) {
  const auto temporary = temporary_beside(path);
  try {
    File file(temporary, File::Mode::create);
    write(file);
    file.sync();
    file.close();
    if (replace) return replace_file(path, temporary);
    rename_new(temporary, path);
  } catch (const Error& error) {
    ::unlink(temporary.c_str());
    rethrow_for(path, temporary, error);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(folder_of(path));
}

void replace_file(const std::filesystem::path& path, const std::filesystem::path& by) {
  if (::rename(by.c_str(), path.c_str()) != 0) fail(ExitCode::retry, "writing", path, errno);
  sync_directory(folder_of(path));
}

void write_file_unsynced(const std::filesystem::path& path, std::string_view content) {
  const auto name = path.filename().string();
  const auto unfinished = path.parent_path() / ((name.starts_with('.') ? "" : ".") + name + ".new");
  std::filesystem::remove(unfinished);
  File file(unfinished, File::Mode::create);
  file.append(content);
  file.close();
  std::filesystem::rename(unfinished, path);
}

void remove_unfinished(const std::filesystem::path& path, bool none_writes) noexcept {
  try {
    const auto prefix = temporary_prefix(path);
    std::error_code error;
    for (std::filesystem::directory_iterator at(folder_of(path), error), end; !error && at != end;
         at.increment(error)) {
      const auto name = at->path().filename().string();
      if (name.starts_with(prefix) && name.find_first_not_of("0123456789.", prefix.size()) == std::string::npos &&
          (none_writes || !may_be_written(at->path(), name.substr(prefix.size()))))
        ::unlink(at->path().c_str());
    }
  } catch (...) {
    // The files stay; the next start of the program tries again.
  }
}

void require_output(const std::filesystem::path& path) {
  const auto doing = "writing " + path.string();
  const auto refuse = [&](const std::string& fact, const char* remedy) {
    throw Error(ExitCode::usage, doing, fact, remedy);
  };
  const auto folder = folder_of(path);
  std::error_code error;
  const auto there = std::filesystem::status(folder, error);
  if (there.type() == std::filesystem::file_type::not_found)
    refuse("there is no folder " + folder.string(), "Make it first");
  if (there.type() == std::filesystem::file_type::none && mkdir_error_code(error.value()) == ExitCode::usage)
    refuse(folder.string() + ": " + error.message(), "Check the path");
  if (there.type() != std::filesystem::file_type::none && !std::filesystem::is_directory(there))
    refuse(folder.string() + " is no folder", "Check the path");
  if (::access(folder.c_str(), W_OK) != 0)
    throw Error(ExitCode::retry, doing, std::strerror(errno), "Check the permissions of " + folder.string());
  const auto type = std::filesystem::symlink_status(path, error).type();
  if (type == std::filesystem::file_type::none) refuse(error.message(), "Choose another name");
  if (path.has_filename() &&
      (type == std::filesystem::file_type::not_found || type == std::filesystem::file_type::regular))
    return;
  refuse(str(path.has_filename() ? kind_of(type) : "a folder", " has this name"), "Choose another");
}

void sync_directory(const std::filesystem::path& path) {
  const int descriptor = open_checked(path, O_RDONLY | O_DIRECTORY, ExitCode::retry, "opening");
  const int status = sync_descriptor(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some file systems cannot sync a folder and return EINVAL; their renames are durable by other means.
  if (status != 0 && error != EINVAL) fail(ExitCode::retry, "syncing", path, error);
}

// Syncs each new folder's parent: synced files are lost if the entry of their folder is lost.
void make_directories(const std::filesystem::path& path) {
  std::error_code error;
  if (path.empty() || std::filesystem::is_directory(path, error)) return;
  const auto parent = path.has_filename() ? path.parent_path() : path.parent_path().parent_path();
  make_directories(parent);
  const bool made = std::filesystem::create_directory(path, error);
  if (error == std::errc::file_exists)
    throw Error(ExitCode::usage, "making the folder " + path.string(), "something that is not a folder has this name",
                "Choose another path");
  if (error) {
    const auto code = mkdir_error_code(error.value());
    throw Error(code, "making the folder " + path.string(), error.message(),
                code == ExitCode::usage ? "Choose another path" : remedy_of(error.value()));
  }
  // A folder that this user may write but not read cannot be synced.
  const auto changed = parent.empty() ? std::filesystem::path(".") : parent;
  if (made && ::access(changed.c_str(), R_OK) == 0) sync_directory(changed);
}

void require_own_directory(const std::filesystem::path& path) {
  const auto doing = "writing into " + path.string();
  struct stat folder {};
  if (::lstat(path.c_str(), &folder) != 0) fail(ExitCode::retry, "looking at", path, errno);
  if (S_ISLNK(folder.st_mode)) throw Error(ExitCode::usage, doing, "it is a symbolic link", "Name the folder itself");
  if (!S_ISDIR(folder.st_mode)) fail(ExitCode::retry, "writing into", path, ENOTDIR);
  const bool is_shared =
      (folder.st_mode & S_IWGRP) != 0 && (folder.st_gid == ::getegid() || ::group_member(folder.st_gid) != 0);
  if (folder.st_uid == ::geteuid() || is_shared) return;
  const auto refuse = [&] {
    throw Error(ExitCode::usage, doing, "it belongs to " + user_of(folder.st_uid),
                "Choose another --name or --storage, or let its owner share it: chmod -R g+w, and "
                "umask 002 before a start");
  };
  // Some file systems report one owner for all of their files. So create a file and compare its owner.
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS) != 0 && errno == EACCES) refuse();
  const auto probe = temporary_beside(path / ".owner");
  struct stat made {};
  {
    const File file(probe, File::Mode::create);
    const int status = ::fstat(file.descriptor(), &made);
    ::unlink(probe.c_str());
    if (status != 0) fail(ExitCode::retry, "looking at", probe, errno);
  }
  if (made.st_uid != folder.st_uid && made.st_uid == ::geteuid()) refuse();
}

void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  int status = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE);
  if (status != 0 && (errno == EINVAL || errno == ENOSYS)) {
    // The file system lacks RENAME_NOREPLACE. No other process writes into the caller's folder, so check, then rename.
    struct stat there {};
    if (::lstat(to.c_str(), &there) == 0) fail(ExitCode::retry, "renaming to", to, EEXIST);
    status = ::rename(from.c_str(), to.c_str());
  }
  if (status != 0) fail(ExitCode::retry, "renaming to", to, errno);
}

void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to) {
  restore_directory(to);
  auto old = from;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    if (errno != ENOENT && errno != EINVAL && errno != ENOSYS) fail(ExitCode::retry, "replacing", to, errno);
    old.clear();
    if (std::filesystem::exists(status_of(to))) rename_new(to, old = replaced_name(to));
    try {
      rename_new(from, to);
    } catch (...) {
      if (!old.empty()) ::rename(old.c_str(), to.c_str());
      throw;
    }
  }
  sync_directory(folder_of(to));
  std::error_code error;
  if (!old.empty()) std::filesystem::remove_all(old, error);
  if (error) fail(ExitCode::retry, "removing", old, error.value());
}

void restore_directory(const std::filesystem::path& to) {
  const auto old = replaced_name(to);
  if (!std::filesystem::exists(status_of(to)) && std::filesystem::exists(status_of(old))) rename_new(old, to);
}

}  // namespace muster::detail
