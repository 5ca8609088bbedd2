// A column whose values lie in chunks of the file, compressed or not.
#pragma once

#include "data/sources/chunk_cache.hpp"
#include "data/sources/chunk_layout.hpp"
#include "data/sources/chunk_places.hpp"
#include "data/sources/column_reader.hpp"
#include "data/sources/decoding_threads.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "hdf5/handle.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// What the chunked columns of a dataset share.
struct ChunkDecoding {
  explicit ChunkDecoding(std::int64_t cache_bytes) : cache(cache_bytes) {}

  ChunkCache cache;
  DecodingThreads threads;
  std::atomic<std::int64_t> places_left = ChunkPlaces::most_of_dataset;
};

/// Rows of chunks that are stored as they are come from the file straight into their destinations. Other chunks are
/// read whole, decoded by several threads, and kept as long as the cache has room. HDF5 and its lock are used only to
/// find chunks that were not read before.
class ChunkedColumn final : public ColumnReader {
 public:
  /// `dataset`: of values of type `stored`; `index` is its own; `decoding` outlives this.
  ChunkedColumn(hdf5::Handle dataset, hid_t stored, hdf5::ChunkIndex index, hdf5::FilterPipeline pipeline,
                ChunkLayout layout, ChunkDecoding& decoding, std::string shown);

  void read(const File& bytes, std::span<const RowDestination> wanted) override;
  void expect(const File& bytes, std::span<const std::int64_t> rows) override;
  /// True if the rows of chunks without filters are read from the file one by one.
  static bool reads_rows_alone(const ChunkLayout& layout);

 private:
  /// A chunk and the wanted rows in it, of which there may be none.
  struct Part {
    std::int64_t number, first_row;
    std::span<const RowDestination> wanted;
  };

  void read_parts(const File& bytes, std::span<const Part> parts);
  void decode(const File& bytes, const Part& part, const hdf5::StoredChunk& stored);
  bool is_read_directly(const hdf5::StoredChunk& stored, const std::vector<ByteRun>& runs) const;
  /// Calls action(run, place of the run in the chunk, its destination) for each run of the wanted rows.
  void each_run(const Part& part, const std::vector<ByteRun>& runs, auto&& action) const;
  void copy(const std::byte* chunk, const Part& part) const;
  void fill(const Part& part) const;
  /// The runs of a chunk, in `memory` if they are not the same for all chunks.
  const std::vector<ByteRun>& runs(std::int64_t number, std::vector<ByteRun>& memory) const;

  hdf5::Handle dataset_;
  hdf5::FilterPipeline pipeline_;
  ChunkLayout layout_;
  ChunkDecoding& decoding_;
  std::string shown_;
  ChunkPlaces places_;
  std::vector<ByteRun> runs_;  ///< of every chunk, if a row lies in one
  bool is_never_cached_ = false;
  std::vector<std::byte> fill_value_;
};

}  // namespace muster::detail::data
