// Reads chunks of a dataset and decodes them, without HDF5's lock.
#pragma once

#include "base/export.hpp"
#include "base/file.hpp"
#include "base/thread_pool.hpp"
#include "data/sources/ahead.hpp"
#include "data/sources/chunk_cache.hpp"
#include "data/sources/chunk_places.hpp"
#include "data/sources/direct_reads.hpp"
#include "data/sources/node_chunks.hpp"
#include "data/sources/scattered_read.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "hdf5/handle.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// How many threads decode beside the one that reads: as many as there are cores for this process beside the caller's,
/// at most 4.
MUSTER_INTERNAL_API int decoding_threads();

/// What the chunked columns of a dataset share.
struct MUSTER_INTERNAL_API ChunkDecoding {
  /// `threads`: how many decode beside the one that reads.
  explicit ChunkDecoding(std::int64_t cache_bytes, std::function<int()> threads = decoding_threads);
  ~ChunkDecoding();
  /// Has requested chunks read past the page cache if the page cache could not keep files of this size.
  void read_directly_beyond_memory(double file_bytes, std::int64_t cache_bytes);
  void end_threads();
  /// The encoded chunks if there are any and all of them fit into the cache; otherwise null.
  NodeChunks* shareable() noexcept { return of_node.bytes() > 0 && cache.fits(of_node.bytes()) ? &of_node : nullptr; }

  std::vector<std::shared_ptr<const hdf5::ForeignChunks>> foreign = {};  ///< of arrays in Zarr stores
  ChunkCache cache;                                                      ///< this rank's own
  NodeChunks of_node{cache};
  std::optional<DirectReads> direct = {};  ///< of requested chunks; none if the page cache can keep the files
  ThreadPool threads;
  std::atomic<std::int64_t> places_left = ChunkPlaces::most_of_dataset;
};

/// A chunk to read. The cache drops a chunk first when all of its rows were taken.
struct WantedChunk {
  std::int64_t number = 0;
  std::int64_t rows = 0, taken = 0;  ///< all of its rows, and how many this read takes
  bool is_over = false;              ///< takes the last rows, in order: a pass in order does not need it again
};

/// What to do with the chunks of a read; `i` is the place of the chunk among the wanted ones. Several threads may use
/// it at once.
class ChunkUse {
 public:
  /// A piece of a chunk: where it begins, where it goes to, and its bytes.
  using Piece = std::function<void(std::size_t in_chunk, std::byte* into, std::size_t bytes)>;

  virtual ~ChunkUse() = default;
  /// Calls action() for each piece that is wanted.
  virtual void each_piece(std::size_t i, const Piece& action) const = 0;
  void copy(std::size_t i, const std::byte* chunk) const;
  /// The chunk was never written: all its values are `value`.
  void fill(std::size_t i, std::span<const std::byte> value) const;
  /// Where the chunk goes to if all of its bytes are wanted, in one piece; otherwise null.
  std::byte* whole(std::size_t i, std::size_t bytes) const;
  /// The chunk is stored as it is, at this offset in the file. Adds what is wanted to `pieces`, or returns false, so
  /// that the chunk is read whole.
  virtual bool read_directly(std::size_t i, std::uint64_t offset, ScatteredRead& pieces) const = 0;
};

/// Reads the chunks of an HDF5 dataset, or those that hdf5::ForeignChunks gives. Decoded chunks are kept in the cache,
/// or in memory that the ranks of a node share. HDF5 and its lock are used only to find chunks whose places are not
/// remembered. Thread-safe.
class MUSTER_INTERNAL_API ChunkReader {
 public:
  /// `fill_value`: as stored; `index`: the dataset's own; `decoding` outlives this.
  ChunkReader(hdf5::Handle dataset, std::vector<std::byte> fill_value, hdf5::ChunkIndex index,
              hdf5::FilterPipeline pipeline, std::size_t chunk_bytes, ChunkDecoding& decoding, std::string shown);
  /// Keeps no chunks: each use reads what it wants directly.
  void keep_none() noexcept { keeps_ = false; }
  /// Has encoded chunks kept in the node's memory once slots are attached. `origin`: see NodeChunks::add().
  void share(const std::string& origin);

  /// Reads chunks in ascending order of their numbers.
  void read(const File& bytes, std::span<const WantedChunk> wanted, const ChunkUse& use);
  /// Prepares chunks with these numbers, which ascend, if they can be kept.
  void expect(const File& bytes, std::span<const WantedChunk> wanted, Ahead how);

  /// True if HDF5 has the chunks, stored without filters.
  bool is_plain() const noexcept { return !places_.foreign() && pipeline_.is_plain(0); }
  /// True if a decoded chunk may be kept.
  bool can_keep() const noexcept { return keeps_ && decoding_.cache.fits(chunk_bytes_); }

 private:
  /// A chunk to decode, and its place among the wanted ones.
  struct ChunkToDecode {
    WantedChunk wanted;
    hdf5::StoredChunk stored;
    std::size_t i;
    const ChunkUse* use;
  };
  const node::SharedSlots* slots() const noexcept { return group_ ? decoding_.of_node.slots() : nullptr; }
  bool use_kept(const WantedChunk& wanted, std::size_t i, const ChunkUse& use);
  void read_missing(const File& bytes, std::span<const WantedChunk> wanted, std::span<const std::size_t> missing,
                    const ChunkUse& use);
  void request(const File& bytes, std::span<const WantedChunk> wanted);
  void add_next(const WantedChunk& last, std::vector<ChunkToDecode>& chunks);
  void decode_all(const File& bytes, std::span<const ChunkToDecode> chunks);
  bool decode_for_node(const File& bytes, const ChunkToDecode& chunk, const node::SharedSlots& slots);
  void decode_for_rank(const File& bytes, const ChunkToDecode& chunk, bool keep);
  bool has_come(std::int64_t number);
  void decode(const File& bytes, const ChunkToDecode& chunk, std::span<std::byte> into) const;

  hdf5::Handle dataset_;
  hdf5::FilterPipeline pipeline_;
  std::size_t chunk_bytes_;
  ChunkDecoding& decoding_;
  std::string shown_;
  ChunkPlaces places_;
  std::vector<std::byte> fill_value_;
  bool keeps_ = true;
  std::atomic<std::int64_t> next_ = -1;  ///< the chunk after those of the last read
  std::mutex mutex_;
  std::vector<bool> come_;            ///< for each of the first chunks: it was read in order before
  std::optional<std::size_t> group_;  ///< in NodeChunks; none if the chunks are not encoded
};

}  // namespace muster::detail::data
