// The places of a column's chunks in its file. HDF5 tells them; they are remembered, so that its lock is seldom needed.
#pragma once

#include "hdf5/chunk_index.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Thread-safe.
class ChunkPlaces {
 public:
  /// How many places all columns of a dataset may remember together: 32 MiB. Each column gets 64 even if none is left.
  static constexpr std::int64_t most_of_dataset = std::int64_t{1} << 20;

  /// `left`: how many of `most_of_dataset` no column has taken. This column takes a power of two of them: enough for
  /// its chunks, or what is left, or 64. It takes none if HDF5 does not have the chunks.
  ChunkPlaces(hdf5::ChunkIndex index, std::atomic<std::int64_t>& left);

  /// The places of the chunks with these numbers, which ascend. Throws the Errors of hdf5::ChunkIndex::locate().
  std::vector<hdf5::StoredChunk> of(std::span<const std::int64_t> numbers);
  /// The chunks if HDF5 does not have them; then their places say nothing.
  const std::shared_ptr<const hdf5::ForeignChunks>& foreign() const noexcept { return index_.foreign(); }
  /// The number of all chunks.
  std::int64_t count() const noexcept { return count_; }
  /// The chunk's name in errors.
  std::string text(std::int64_t number) const { return index_.text(number); }

 private:
  struct Known {
    std::int64_t number = -1;
    hdf5::StoredChunk chunk = {};
  };

  Known& slot_of(std::int64_t number) { return known_[static_cast<std::size_t>(number) & (slots_ - 1)]; }
  void remember(std::span<const std::int64_t> numbers, std::span<const hdf5::StoredChunk> chunks);
  void look_up_neighbours(std::span<const std::int64_t> numbers);

  hdf5::ChunkIndex index_;
  std::int64_t count_ = 1;  ///< of all chunks
  std::size_t slots_ = 0;   ///< a power of two
  std::mutex mutex_;
  std::vector<Known> known_;  ///< by the last bits of the number; of numbers that agree in them, the latest one
};

}  // namespace muster::detail::data
