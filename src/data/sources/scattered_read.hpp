// Reads pieces of a file into places of the memory with few system calls.
#pragma once

#include "base/file.hpp"

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Bytes; where whole chunks can be kept, shorter pieces are copied from them, not read one by one.
constexpr std::size_t short_piece = 256;

/// Pieces that follow one another in the file, or nearly so, are read by one call.
class ScatteredRead {
 public:
  /// `shown`: what is read, in errors.
  ScatteredRead(const File& file, const std::string& shown) : file_(file), shown_(shown) {}

  /// Adds a piece. It is read by this call, a later one, or finish(). Throws an Error (ExitCode::retry) if the disk
  /// could not be read, or ExitCode::data if the file ends before.
  void add(std::uint64_t offset, std::byte* into, std::size_t bytes);
  void finish();

 private:
  static constexpr std::size_t most_skipped = 1024;  ///< bytes; to read more of them costs more than another call

  const File& file_;
  const std::string& shown_;
  std::vector<iovec> pieces_;
  std::uint64_t begin_ = 0, end_ = 0;  ///< where the pieces lie in the file
  std::array<std::byte, most_skipped> skipped_;
};

}  // namespace muster::detail::data
