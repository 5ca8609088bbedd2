// Files: every call checked, writes that are on the disk when they return. Errors are muster::Error and name the path
// and the system's word: ExitCode::data for what a file is (missing, a folder, too short), ExitCode::retry for a read
// or a write that failed, which says nothing about the content.
// Reading follows symbolic links. Writing does not: a file that is a link is an Error, and write_file() replaces the
// link, never what it points to.
#pragma once

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
class File {
 public:
  enum class Mode {
    read,
    write,   ///< an existing file, read and write
    create,  ///< a new file, read and write; an error if it exists
    append,  ///< made if missing; every write goes to the end
  };

  File(const std::filesystem::path& path, Mode mode);
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  /// Bytes in the file now.
  std::uint64_t size() const;
  /// Reads exactly `into.size()` bytes from `offset`; a file that ends before is an Error ("truncated").
  void read_at(std::span<std::byte> into, std::uint64_t offset) const;
  /// Writes all of `from` at `offset` (in Mode::append: at the end).
  void write_at(std::span<const std::byte> from, std::uint64_t offset);
  void append(std::string_view text);
  void truncate(std::uint64_t size);
  /// Until it is on the disk. After an error the file's content is unknown: discard it, never try again.
  void sync();
  void close();

  int descriptor() const noexcept { return descriptor_; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  /// An Error (ExitCode::data) unless it is a regular file; it is closed then.
  void require_file();

  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// What the errno of a failed open or read means: data where nothing, or something else, stands at the path; retry for
/// all others (EIO, ESTALE, EMFILE, EACCES …).
ExitCode code_of_reading(int error) noexcept;
/// What stands at `path`, links not followed; not_found if nothing does. An Error if that cannot be seen, of the code
/// that code_of_reading() gives.
std::filesystem::file_status status_of(const std::filesystem::path& path);
/// The whole file as text; one that is longer than `most` bytes is an Error (ExitCode::data).
std::string read_file(const std::filesystem::path& path, std::uint64_t most = std::uint64_t{1} << 40);
/// Replaces `path` by `content`, durably: after a crash the old or the new file is there, whole.
void write_file(const std::filesystem::path& path, std::string_view content);
/// The same with what `write` puts into the file; what it throws leaves `path` as it was. Without `replace` a file that
/// is there is an Error.
void write_file(const std::filesystem::path& path, const std::function<void(File&)>& write, bool replace = true);
/// Removes what write_file() left beside `path` when its process was killed. Unless the caller knows that nobody is
/// writing it now (`none_writes`), the files of processes that this machine still runs are left alone.
void remove_unfinished(const std::filesystem::path& path, bool none_writes = true) noexcept;
/// An Error (ExitCode::usage) unless a new file may take the name `path`: its folder is there, and nothing but a file
/// has that name, so that no link, pipe or device is replaced. ExitCode::retry if the folder cannot be written.
void require_output(const std::filesystem::path& path);
/// The entries of the folder itself on the disk (after a create, rename or unlink in it).
void sync_directory(const std::filesystem::path& path);
/// Makes the folder and its parents, mode 0777 less the umask. Where a file or a loop of links is in the way, or a name
/// is too long, the Error has ExitCode::usage.
void make_directories(const std::filesystem::path& path);
/// An Error (ExitCode::usage) unless the folder may be trusted with what this process writes: it is no symbolic link
/// and belongs to whom a file belongs that is made in it, or its mode lets a group of this user's write, as projects
/// share folders. Where the file system gives files to somebody else (root-squash), owners say nothing.
void require_own_directory(const std::filesystem::path& path);
/// rename(2) that refuses to replace; an Error if `to` exists.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);
/// Gives the folder `from`, which is on the disk, the name of the folder `to`, if there is one, and removes that. A
/// kill leaves one of them at `to`; on a file system that cannot exchange names it may leave none there, and the old
/// one where take_back_directory() finds it.
void replace_directory(const std::filesystem::path& from, const std::filesystem::path& to);
/// Brings back what a replace_directory() that was killed has left nothing of at `to`.
void take_back_directory(const std::filesystem::path& to);

}  // namespace muster::detail
