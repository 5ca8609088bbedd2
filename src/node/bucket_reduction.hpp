// A reduction over a fixed list of buckets that is run again and again, as gradients are.
//
// Every rank publishes where its buckets lie in registered memory, one after the other in an agreed order, each as soon
// as it is complete. A bucket that all ranks have published may be worked on, in chunks, by whoever comes first: the
// rank that is early does more, and nobody waits for a turn. A round ends when all chunks are done and all ranks know.
//
//   reduction.begin();
//   for (…) reduction.publish(address);             // every bucket, in order
//   while (!reduction.advance(sum)) …;              // now every rank's buckets hold the result
#pragma once

#include "node/communicator.hpp"
#include "node/dtype.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace muster::detail::node {

class BucketReduction {
 public:
  struct Bucket {
    std::size_t count = 0;  ///< elements
    Dtype type = Dtype::f32;
  };
  /// What one rank works on at once.
  struct Chunk {
    std::size_t number = 0;  ///< among those of all buckets
    std::size_t bucket = 0;
    std::size_t first = 0;  ///< element of the bucket
    std::size_t count = 0;
  };
  /// What is done with a chunk; data[r] is where it begins in the memory of rank r. It is called once per chunk and
  /// round, by any of the ranks.
  using OnChunk = std::function<void(const Chunk& chunk, std::span<std::byte* const> data)>;

  /// Bytes of memory, aligned to a page, for that many buckets and words.
  static std::size_t memory(int size, std::size_t buckets, std::size_t words);

  /// `memory`: as for a Communicator, and the same for all ranks; `region` holds the ranks' buckets. Buckets and the
  /// number of words are the same on all ranks.
  BucketReduction(std::byte* memory, Region region, int rank, int size, std::vector<Bucket> buckets, std::size_t words);

  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  std::size_t chunks() const noexcept { return chunks_.size(); }

  /// A new round; the one before has ended.
  void begin();
  /// The next bucket in the order lies at `data`, in this rank's memory of the region, and stays there until the round
  /// has ended.
  void publish(const void* data);
  /// A word that all ranks can read when the round has ended; each is written in every round, before the last bucket is
  /// published. One that is written before the first bucket is published can be read in OnChunk as well.
  void write_word(std::size_t index, std::uint32_t word);
  /// Does one chunk if one is ready; true when the round has ended. All ranks do the same.
  bool advance(const OnChunk& on_chunk);
  /// Does one chunk if one is ready, and says whether it did: for a progress thread of this rank, from begin() until
  /// the rank calls advance(). The thread has an OnChunk of its own.
  bool progress(const OnChunk& on_chunk) { return next_chunk(thread_, on_chunk) == Next::done; }

  /// Order in which buckets are published and worked on from the next round on, a permutation of their indices, at
  /// first that of the list. Between two rounds, the same on all ranks.
  void reorder(const std::vector<std::size_t>& order);
  const std::vector<std::size_t>& order() const noexcept { return order_; }

  /// Of the round that has ended, until the next begins; in OnChunk of the round under way.
  std::uint32_t word(int rank, std::size_t index) const;

 private:
  struct Shared;
  /// What a thread of the rank knows.
  struct Seen {
    std::size_t ready = 0;  ///< buckets that all ranks have published
    std::vector<std::byte*> data = {};
  };
  /// What became of the next chunk.
  enum class Next { done, not_ready, none_left };

  Next next_chunk(Seen& seen, const OnChunk& on_chunk) const;
  /// What the rank writes in this round: the offsets of its buckets, then its words.
  std::uint64_t* written(int rank) const;
  /// Buckets that all ranks have published.
  std::size_t published() const;

  Shared* shared_;
  Region region_;
  int rank_;
  int size_;
  std::vector<Bucket> buckets_;
  std::size_t words_;
  std::vector<std::size_t> order_;     ///< buckets
  std::vector<std::size_t> position_;  ///< [buckets] in that order
  std::vector<Chunk> chunks_;          ///< in that order
  Seen own_, thread_;                  ///< of the rank itself and of its progress thread
  std::uint64_t round_ = 0;
  std::size_t mine_ = 0;  ///< buckets that this rank has published
  bool finished_ = true;
};

/// For an average: the sum over the ranks, in their order, times `scale`, to all of them.
BucketReduction::OnChunk in_place_sum(std::vector<BucketReduction::Bucket> buckets, double scale);

}  // namespace muster::detail::node
