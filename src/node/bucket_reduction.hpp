// A reduction over a fixed list of buckets that is repeated in rounds, as for gradients.
//
// Every rank announces the addresses of its buckets in registered memory, one after the other in an agreed order, each
// as soon as it is complete. Once all ranks have announced a bucket, any rank may claim and process its chunks. A rank
// that is early does more work, and no rank waits for its turn. A round ends when all chunks are done and all ranks
// know it. Where chunks also cross nodes, each belongs to one rank of the node instead, which processes it over a
// longer time (next_own(), finish()).
//
//   reduction.begin();
//   for (…) reduction.announce(address);             // every bucket, in order
//   while (!reduction.advance(sum)) …;              // now every rank's buckets hold the result
#pragma once

#include "node/communicator.hpp"
#include "node/dtype.hpp"
#include "node/slice.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace muster::detail::node {

/// How buckets are cut into chunks, and which rank of the node processes a chunk.
struct Chunking {
  std::size_t bytes = claimed_bytes;  ///< the most bytes of a chunk
  int owners = 0;                     ///< chunk i belongs to rank i % owners; if 0, the ranks claim chunks
};

/// One rank's side of the reduction: the shared memory, the buckets and their order, and how far the round has come.
class BucketReduction {
 public:
  struct Bucket {
    std::size_t count = 0;  ///< elements
    Dtype type = Dtype::f32;
  };
  /// Part of a bucket that one rank processes at once.
  struct Chunk {
    std::size_t number = 0;  ///< index among the chunks of all buckets
    std::size_t bucket = 0;
    std::size_t first = 0;  ///< first element, counted in the bucket
    std::size_t count = 0;  ///< elements
  };
  /// Processes a chunk; data[r] is the chunk's address in the memory of rank r. Called once per chunk and round, on any
  /// of the ranks.
  using OnChunk = std::function<void(const Chunk& chunk, std::span<std::byte* const> data)>;

  /// Bytes of page-aligned memory that this many ranks, buckets and words need.
  static std::size_t memory_bytes(int size, std::size_t buckets, std::size_t words);

  /// `memory`: shared by all ranks, as for a NodeCommunicator. `region` holds the ranks' buckets. The buckets and the
  /// number of words are the same on all ranks.
  BucketReduction(std::byte* memory, Region region, int rank, int size, std::vector<Bucket> buckets, std::size_t words,
                  Chunking chunking = {});

  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  std::size_t chunks() const noexcept { return chunks_.size(); }
  /// If chunks have owners: returns this rank's chunks. The list is valid until reorder() is called.
  std::vector<Chunk> own_chunks() const;

  /// Begins a new round; the previous one must have ended.
  void begin();
  /// Announces the next bucket in the order. `data` is in this rank's part of the region and must stay in place until
  /// the round has ended; null if this rank has nothing for the bucket. Then its chunks are not processed or, if chunks
  /// have owners, data[r] is null for this rank.
  void announce(const void* data);
  std::size_t own_announced() const noexcept { return own_announced_; }
  bool announced_all() const noexcept { return own_announced_ == buckets_.size(); }
  /// Writes a word that all ranks can read once the round has ended. Write each word in every round, before the last
  /// bucket is announced. A word written before the first bucket is announced can be read in OnChunk too.
  void write_word(std::size_t index, std::uint32_t word);
  /// Processes one chunk if one is ready; true if the round has ended. All ranks must pass equivalent functions.
  bool advance(const OnChunk& on_chunk);
  /// If chunks have owners: once all ranks have announced the bucket of this rank's next chunk, calls body(chunk,
  /// data), as an OnChunk is called, and returns true; else false. body() may leave the work to a later time.
  bool next_own(const OnChunk& body);
  /// If chunks have owners: true if next_own() has given out all chunks of this rank.
  bool gave_all() const noexcept { return own_chunk_ >= chunks_.size(); }
  /// Call it repeatedly once this rank has processed its chunks. Tells the other ranks so when this rank has also
  /// announced all buckets. True if the round has ended on all ranks.
  bool finish();
  /// True once finish() has found that the round has ended on all ranks.
  bool is_over() const noexcept { return over_; }
  /// Processes one chunk if one is ready; true if it did. For a progress thread of this rank, from begin() until the
  /// rank calls advance(). The thread needs a separate OnChunk object.
  bool process_chunk(const OnChunk& on_chunk) { return next_chunk(seen_by_thread_, on_chunk) == Next::done; }

  /// Sets the order in which buckets are announced and processed from the next round on: a permutation of their
  /// indices, at first 0, 1, …. Call it between two rounds, with the same order on all ranks.
  void reorder(const std::vector<std::size_t>& order);
  const std::vector<std::size_t>& order() const noexcept { return order_; }

  /// Returns a word of the round that has ended, until the next round begins; inside OnChunk, of the current round.
  std::uint32_t word(int rank, std::size_t index) const;

 private:
  struct Shared;
  /// What one thread has seen of the current round.
  struct Seen {
    std::size_t ready = 0;  ///< buckets that all ranks have announced
    std::vector<std::byte*> data = {};
  };
  /// The result of next_chunk().
  enum class Next { done, not_ready, none_left };

  Next next_chunk(Seen& seen, const OnChunk& on_chunk) const;
  /// Where the rank writes in this round: the offsets of its buckets, then its words.
  std::uint64_t* written(int rank) const;
  void process(Seen& seen, const Chunk& chunk, const OnChunk& on_chunk) const;
  /// The number of buckets that all ranks have announced.
  std::size_t announced() const;

  Shared* shared_;
  Region region_;
  int rank_;
  int size_;
  std::vector<Bucket> buckets_;
  std::size_t words_;
  int owners_;
  std::vector<std::size_t> order_;      ///< indices of buckets
  std::vector<std::size_t> position_;   ///< [buckets]: position in order_
  std::vector<Chunk> chunks_;           ///< in the order of order_
  Seen seen_by_rank_, seen_by_thread_;  ///< what the rank's own thread and its progress thread have seen
  std::uint64_t round_ = 0;
  std::size_t own_announced_ = 0;  ///< buckets that this rank has announced
  std::size_t own_chunk_ = 0;      ///< position in chunks_ of the next chunk that this rank owns
  bool finished_ = true, over_ = true;
};

/// Returns an OnChunk that averages: it writes the sum over the ranks, in their order, times `scale`, to all of them.
BucketReduction::OnChunk in_place_sum(std::vector<BucketReduction::Bucket> buckets, double scale);

}  // namespace muster::detail::node
