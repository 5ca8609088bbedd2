// Files: write_file() returns when the data are on the disk. Failures throw muster::Error, which names the path and the
// system's error text: ExitCode::data if a file to be read is wrong (missing, a folder, too short); otherwise
// ExitCode::retry, which says nothing about the content, unless the function says another code. Reading follows
// symbolic links. Writing does not: opening a link throws an Error, and write_file() replaces the link, never its
// target.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

namespace muster::detail {

/// An open file descriptor. Move-only; the destructor closes and ignores errors, so a writer calls close() itself.
class MUSTER_INTERNAL_API File {
 public:
  enum class Mode {
    read,
    write,   ///< an existing file, read and write
    create,  ///< a new file, read and write; an error if it exists
    append,  ///< created if missing; every write goes to the end
  };

  File(const std::filesystem::path& path, Mode mode);
  /// Takes over an open descriptor. `path` only names the file in errors.
  File(const std::filesystem::path& path, int descriptor) : path_(path), descriptor_(descriptor) {}
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  /// The file's present size in bytes.
  std::uint64_t size() const;
  /// Reads exactly `into.size()` bytes from `offset`. Throws an Error ("truncated") if the file ends before.
  void read_at(std::span<std::byte> into, std::uint64_t offset) const;
  /// Has the system begin to read this part into memory, and does not wait for it. Ignores errors.
  void will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept;
  /// Writes all of `from` at `offset` (in Mode::append: at the end).
  void write_at(std::span<const std::byte> from, std::uint64_t offset);
  void append(std::string_view text);
  void truncate(std::uint64_t size);
  /// Returns when the data are on the disk. After an error the content is unknown: discard the file, do not retry.
  void sync();
  void close();

  int descriptor() const noexcept { return descriptor_; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  /// Closes the file and throws an Error unless it is a regular file.
  void require_file();

  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// The exit code for the errno of a failed open or read: data if the path is at fault (nothing or no file is there, a
/// loop of links, too long a name); retry for all others (EIO, ESTALE, EMFILE, EACCES …).
ExitCode read_error_code(int error) noexcept;
/// What to do about the errno of a failed open, read or write; empty if the error's text says enough.
const char* remedy_of(int error) noexcept;
/// The type of what is at `path`, without following links; not_found if there is nothing. Throws an Error with the code
/// of read_error_code() if that cannot be found out.
MUSTER_INTERNAL_API std::filesystem::file_status status_of(const std::filesystem::path& path);
/// Reads the whole file as text. Throws an Error (ExitCode::data) if it is longer than `most` bytes.
MUSTER_INTERNAL_API std::string read_file(const std::filesystem::path& path,
                                          std::uint64_t most = std::uint64_t{1} << 40);
/// Replaces `path` by `content`, durably: after a crash either the old or the new file is there, complete.
MUSTER_INTERNAL_API void write_file(const std::filesystem::path& path, std::string_view content);
/// Like write_file(path, content), but `write` fills the file. If `write` throws, `path` is unchanged. Without
/// `replace`, throws an Error if `path` exists.
MUSTER_INTERNAL_API void write_file(const std::filesystem::path& path, const std::function<void(File&)>& write,
                                    bool replace = true);
/// Replaces `path`, durably, by the file `by`, which the caller has written in the same folder, synced and closed.
MUSTER_INTERNAL_API void replace_file(const std::filesystem::path& path, const std::filesystem::path& by);
/// Like write_file(), but does not wait for the disk: after a crash of the machine the file may be empty. For one
/// writer at a time. May also throw a filesystem_error.
void write_file_unsynced(const std::filesystem::path& path, std::string_view content);
/// Makes a name for a temporary file beside `path`, by which remove_unfinished() recognises it.
MUSTER_INTERNAL_API std::filesystem::path temporary_beside(std::filesystem::path path);
/// Removes the temporary files that killed processes have left beside `path`. `none_writes`: no process is writing
/// `path` now; without it, files of processes that run on this machine are kept, and so are files of other hosts that
/// were written to in the last 24 hours.
MUSTER_INTERNAL_API void remove_unfinished(const std::filesystem::path& path, bool none_writes = true) noexcept;
/// Throws an Error (ExitCode::usage) unless a new file may be written at `path`: its folder exists, and there is
/// nothing or a regular file at `path`, so that no link, pipe or device is replaced. ExitCode::retry if the folder is
/// not writable.
MUSTER_INTERNAL_API void require_output(const std::filesystem::path& path);
/// Writes the folder's entries to the disk. Call it after a file in the folder was created, renamed or removed.
void sync_directory(const std::filesystem::path& path);
/// Creates the folder and its parents, durably, with mode 0777 less the umask. The Error has ExitCode::usage if a file
/// or a loop of links is in the way, or if a name is too long.
MUSTER_INTERNAL_API void make_directories(const std::filesystem::path& path);
/// Throws an Error (ExitCode::usage) unless this process may safely write into the folder. It must not be a symbolic
/// link. It must belong to this user, or a group of this user must have write permission, as in folders that a project
/// shares. Owners are ignored if the file system gives new files to another user (root-squash).
MUSTER_INTERNAL_API void require_own_directory(const std::filesystem::path& path);
/// Like rename(2), but throws an Error if `to` exists. No other process may create `to` meanwhile.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);
/// Renames the folder `from`, which must be synced, to `to`, and removes the folder that was at `to`, if any. If the
/// process is killed meanwhile, the old or the new folder is at `to`. But on a file system that cannot exchange names,
/// `to` may then be missing, and restore_directory() brings the old folder back.
MUSTER_INTERNAL_API void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);
/// Restores the folder `to` if a replace_directory() was killed and has left nothing at `to`.
MUSTER_INTERNAL_API void restore_directory(const std::filesystem::path& to);

}  // namespace muster::detail
