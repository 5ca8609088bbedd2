// Writes of this process that do less than they are asked to. They stand in for the C library's own, so a test that
// wants them is linked with sick_writes.cpp.
#pragma once

namespace muster::test {

/// While it lives, of the calls pwrite, write and fsync on files with `name` in their paths: with error 0 every second
/// call is interrupted by a signal (EINTR) and every other write writes half; with another error all of them fail. One
/// at a time.
class SickWrites {
 public:
  explicit SickWrites(const char* name, int error = 0);
  SickWrites(const SickWrites&) = delete;
  SickWrites& operator=(const SickWrites&) = delete;
  ~SickWrites();

  /// Their number.
  int count() const noexcept;
};

}  // namespace muster::test
