// Where the launcher and MPI keep files while a job runs. They leave them behind when they are killed, so they are
// given folders that are emptied after every start.
#pragma once

#include "supervise/launch_command.hpp"

namespace muster::detail::supervise {

/// New folders, for this user alone, which are gone with this object. There is none in shared memory where /dev/shm
/// takes none: then the launcher and MPI do without as they can. Those of a `muster run` that was killed are removed
/// when the next one begins.
class OwnFolders {
 public:
  OwnFolders();
  OwnFolders(const OwnFolders&) = delete;
  OwnFolders& operator=(const OwnFolders&) = delete;
  ~OwnFolders();

  const Folders& paths() const noexcept { return paths_; }
  void empty() noexcept;

 private:
  Folders paths_;
  int locks_[2] = {-1, -1};  ///< held as long as this process lives
};

}  // namespace muster::detail::supervise
