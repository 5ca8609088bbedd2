// Where the chunks of a dataset lie in its file, so that they can be read without HDF5 and its lock. Chunks are
// numbered in the order of their coordinates, the last dimension running fastest.
#pragma once

#include "base/export.hpp"
#include "hdf5/foreign_chunks.hpp"
#include "hdf5/handle.hpp"
#include "hdf5/read_driver.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// The place of a chunk. A chunk that was never written has no bytes; its values are the fill value.
struct StoredChunk {
  std::uint64_t offset = 0;       ///< in the file, in bytes
  std::uint64_t bytes = 0;        ///< as stored
  std::uint32_t filter_mask = 0;  ///< bit i is set if filter i was left out
  bool is_stored = false;
};

/// The place of a chunk in a grid of so many chunks along each dimension.
std::vector<std::int64_t> chunk_coordinates(std::int64_t number, const std::vector<std::int64_t>& grid);

class MUSTER_INTERNAL_API ChunkIndex {
 public:
  /// `dataset`: a chunked dataset, which must outlive this object. `shown`: its name in errors. Throws an Error if it
  /// has more chunks than can be counted.
  ChunkIndex(hid_t dataset, const std::string& shown);

  /// The sizes of a chunk, in values.
  const std::vector<std::int64_t>& chunk_shape() const noexcept { return chunk_; }
  /// The number of chunks along each dimension.
  const std::vector<std::int64_t>& grid() const noexcept { return grid_; }
  /// "chunk (0, 3)", for errors.
  std::string text(std::int64_t number) const;

  /// The chunks, if they lie outside of the HDF5 file (foreign_chunks.hpp); otherwise null. Of such chunks, locate()
  /// returns no places; it only says that they are stored.
  const std::shared_ptr<const ForeignChunks>& foreign() const noexcept { return foreign_; }
  /// False if HDF5 does not tell where chunks lie, because another driver reads the file or a later release of HDF5
  /// reads chunks in another way. Then locate() must not be called.
  bool locates() const noexcept { return file_ != nullptr || foreign_; }
  /// The places of the chunks with these numbers, in that order; looks up only these. Takes HDF5's lock once. Throws an
  /// Error (ExitCode::data) if the index is damaged or a chunk ends beyond the end of the file.
  std::vector<StoredChunk> locate(std::span<const std::int64_t> numbers) const;

 private:
  StoredChunk locate(std::int64_t number, void* unused) const;
  void check_that_reads_are_noted();
  bool is_at_edge(std::int64_t number) const;
  [[noreturn]] void refuse(std::int64_t number, const Reason& reason) const;

  hid_t dataset_;
  std::string shown_;
  std::vector<std::int64_t> shape_, chunk_, grid_;
  std::shared_ptr<const ForeignChunks> foreign_;
  OpenForReading* file_ = nullptr;
  bool plain_edges_ = false;  ///< true if chunks that the dataset fills only in part are stored without filters
};

}  // namespace muster::detail::hdf5
