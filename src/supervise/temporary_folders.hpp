// Folders for the files that the launcher and MPI keep while a job runs. They leave files behind when they are killed,
// so these folders are emptied after every start.
#pragma once

#include "supervise/launch_command.hpp"

namespace muster::detail::supervise {

/// New folders that only this user can read; removed with this object. If /dev/shm has no room for one, the launcher
/// and MPI must do without it. Folders of a `muster run` that was killed are removed when the next one begins.
class TemporaryFolders {
 public:
  TemporaryFolders();
  TemporaryFolders(const TemporaryFolders&) = delete;
  TemporaryFolders& operator=(const TemporaryFolders&) = delete;
  ~TemporaryFolders();

  const Folders& paths() const noexcept { return paths_; }
  void empty() noexcept;

 private:
  Folders paths_;
  int locks_[2] = {-1, -1};  ///< held while this process lives
};

}  // namespace muster::detail::supervise
