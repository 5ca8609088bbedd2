// Each change that this process makes to files, before and after it is made. Functions that take the place of the C
// library's own stand behind it, so a test that wants it is linked with file_changes.cpp.
#pragma once

#include <string>

namespace muster::test {

struct FileChange {
  enum class Kind { create, write, sync, make_folder, set_mode, rename, link, remove };
  Kind kind;
  std::string path;
  std::string to = {};  ///< rename: the new name; link: where it leads
  int descriptor = -1;  ///< write and sync
};

/// Sees the changes of all threads while it is the active watcher.
class FileWatcher {
 public:
  virtual ~FileWatcher() = default;
  /// False: the change is not made, and its call fails with the errno that was set here.
  virtual bool before(const FileChange& change) = 0;
  /// Called when the change was made.
  virtual void after(const FileChange& /*change*/) {}
};

/// Null if no object watches.
void watch_files(FileWatcher* watcher) noexcept;

}  // namespace muster::test
