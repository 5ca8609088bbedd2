// Folders for the files that the launcher and MPI make while a job runs. When these are killed they leave files behind,
// so the folders are emptied after every start.
#pragma once

#include "supervise/launch_command.hpp"

namespace muster::detail::supervise {

/// Makes new folders that only this user can read, and removes them when it is destroyed. If /dev/shm has no room for
/// one, the launcher and MPI use their defaults. The folders of a `muster run` that was killed are removed by the next
/// `muster run`.
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
  int locks_[2] = {-1, -1};  ///< file descriptors that lock the folders while this process lives
};

}  // namespace muster::detail::supervise
