// Lets calls of this process fail as on a broken disk or file server. They replace the C library's, so a test
// that wants them is linked with io_errors.cpp.
#pragma once

#include <string>

namespace muster::test {

/// While it lives, `call` (open, fstat, lstat, pread, preadv, madvise, opendir, rmdir, renameat2, posix_fallocate)
/// fails with `error` on every path that ends with `name`; with error 0 it does what it should and is counted. One at a
/// time.
class IoError {
 public:
  IoError(std::string call, std::string name, int error);
  IoError(const IoError&) = delete;
  IoError& operator=(const IoError&) = delete;
  ~IoError();

  /// How often it was called.
  int count() const noexcept;
};

}  // namespace muster::test
