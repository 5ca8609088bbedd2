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

/// Opens a file to read it by ScatteredRead, which requests what it needs; the system reads nothing ahead, as that
/// would be much beside samples in a random order.
File open_for_pieces(const std::string& path);

/// Bytes; where whole chunks can be kept, shorter pieces are copied from them, not read one by one.
constexpr std::size_t short_piece = 256;

/// Pieces that follow one another in the file, or nearly so, are read by one call. Those that must come from the disk
/// are requested at once, and read together in finish(): the disk then works on all of them at the same time.
class ScatteredRead {
 public:
  /// `shown`: what is read, in errors.
  ScatteredRead(const File& file, const std::string& shown) : file_(file), shown_(shown) {}

  /// Adds a piece. It is read by this call, a later one, or finish(). Throws an Error (ExitCode::retry) if the disk
  /// could not be read, or ExitCode::data if the file ends before.
  void add(std::uint64_t offset, std::byte* into, std::size_t bytes);
  void finish();

 private:
  /// Pieces that follow one another in the file from `offset` on: pieces_[first … end).
  struct Run {
    std::uint64_t offset;
    std::size_t first, end;
  };
  static constexpr std::size_t most_skipped = 1024;  ///< bytes; to read more of them costs more than another call

  void end_run();
  bool read_cached(Run& run);
  void read(Run run);
  void advance(Run& run, std::size_t bytes);

  const File& file_;
  const std::string& shown_;
  std::vector<iovec> pieces_;  ///< of the runs that wait for the disk, then of the last one
  std::vector<Run> waiting_;
  std::size_t first_ = 0;              ///< index of the last run's first piece
  std::uint64_t begin_ = 0, end_ = 0;  ///< where the last run lies in the file
  bool tells_cached_ = true;           ///< the file system can say that a read would wait
  std::array<std::byte, most_skipped> skipped_;
};

}  // namespace muster::detail::data
