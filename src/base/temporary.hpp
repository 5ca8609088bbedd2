// The user's folder for temporary files, folders in it, and the user's home folder.
#pragma once

#include "base/export.hpp"

#include <filesystem>
#include <string>

namespace muster::detail {

/// TMPDIR, or /tmp if that is unset or empty. Throws an Error (ExitCode::usage) if it is no folder.
MUSTER_INTERNAL_API std::filesystem::path temporary_parent();

/// A new folder; the destructor removes it with everything in it.
class MUSTER_INTERNAL_API TemporaryFolder {
 public:
  /// Makes a folder in `parent` whose name begins with `prefix`. Throws an Error (ExitCode::retry) if that fails.
  explicit TemporaryFolder(const std::string& prefix, const std::filesystem::path& parent = temporary_parent());
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// Sets HOME to /nonexistent for a user who has neither HOME nor an entry in passwd, because Open MPI would crash. Such
/// users are common in containers with another user id. Call it before threads and other processes are started.
MUSTER_INTERNAL_API void ensure_home() noexcept;

}  // namespace muster::detail
