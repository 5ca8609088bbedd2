// Averages gradients in place, in node-shared memory, where backward() makes them (gradient_allocator.hpp). Each rank
// averages a part of the elements: it reads that part from all ranks and writes the average to all ranks. Small
// gradients, and gradients that cannot be averaged where they lie, are copied first. Over several nodes, parts are sent
// from where they lie (between_nodes.hpp); a rank that is alone on its node needs no shared memory.
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/between_nodes.hpp"
#include "gradients/exchange.hpp"
#include "gradients/flat_layout.hpp"
#include "gradients/gradient_allocator.hpp"
#include "gradients/progress_thread.hpp"
#include "muster/communicator.hpp"
#include "node/bucket_reduction.hpp"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::gradients {

/// For parameters on the CPU.
class SharedExchange final : public Exchange {
 public:
  /// Returns null if it cannot be used: a single rank, another device, no parameters, a type that the code in node/
  /// cannot reduce, or no room in /dev/shm. `communicator` must serve this exchange only. With `progress_thread`, a
  /// second thread computes averages while backward() runs; over several nodes only if threads may call MPI. `send_as`:
  /// see BetweenNodes. Collective.
  static std::unique_ptr<SharedExchange> make(const std::vector<at::Tensor>& parameters,
                                              const Communicator& communicator, bool progress_thread,
                                              std::optional<at::ScalarType> send_as = {});
  ~SharedExchange() override;

  void finish() override;
  bool holds(std::size_t index) const noexcept override;
  int user_count(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  Flags flags() const override;
  double mean_weight() const override;
  SharedExchange* fusable() noexcept override { return this; }

  // For a fused optimizer (optim/fused_step.hpp): the gradients of all ranks, in memory that this rank can read; over
  // several nodes the averages, of which each node has a share.
  using Chunk = node::BucketReduction::Chunk;
  const Communicator& communicator() const noexcept { return communicator_; }
  /// How parameters lie in buckets; a bucket is reduced as a whole.
  const FlatLayout& layout() const noexcept { return layout_; }
  /// The strides in which the other ranks see this rank's gradient: its parameter's current strides; for a small
  /// gradient, which is always copied, the strides that its parameter had when this exchange was made.
  at::IntArrayRef strides(std::size_t index) const;
  /// Number of chunks in all buckets together. In a round, one rank (over several nodes, one of each node) processes
  /// each chunk.
  std::size_t chunk_count() const noexcept { return reduction_.chunks(); }
  /// Over several nodes: the chunks that this rank processes, the same on each node.
  std::vector<Chunk> own_chunks() const { return reduction_.own_chunks(); }
  /// The sum of what on_chunk gets, divided by this, is the average.
  int divisor() const noexcept { return nodes_ ? 1 : communicator_.size(); }
  /// True if Arrival::left_in_backward gains anything.
  bool averages_early() const noexcept { return nodes_ != nullptr; }
  /// Returns the OR of all ranks' flags, which are sent at once, also in a round. Collective.
  Flags agree(Flags mine);
  /// Call it in a round of Arrival::left_in_backward once every gradient was added. `valid`: true if the gradients, and
  /// the uses given with them, have not changed since. If that holds on all ranks, returns true, and the round goes on
  /// as if it had been begun by Arrival::left with these flags, and this check word. Else ends the round. In a round of
  /// Arrival::left, all of this holds with the flags and the word of its beginning. Collective.
  bool go_on(bool valid, Flags flags, std::uint32_t word);
  /// Call it instead of finish(), once or several times in a round. It calls on_chunk for the chunks and does not
  /// average: the gradients stay as they are. Over several nodes, on_chunk is not called if a rank has abandoned the
  /// round. user_count(), flags() and all_words_equal() may be called in on_chunk, too. Collective.
  void finish_with(const ChunkStep& step);
  /// Sets a word that this rank sends along with its gradients. Call it between begin() and the first add().
  void set_check_word(std::uint32_t word);
  /// True if all ranks have set the same word.
  bool all_words_equal() const;

 private:
  struct Gradient;
  struct Bucket;
  struct MemoryLayout;

  SharedExchange(const std::vector<at::Tensor>& parameters, MemoryLayout memory, Communicator communicator,
                 comm::SharedRegion control, comm::SharedRegion region, bool progress_thread,
                 std::optional<at::ScalarType> send_as);
  void begin_round() override;
  void add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;
  std::byte* room_for_copy(Bucket& bucket, std::size_t bytes);
  void drop_copy(std::size_t index);
  bool in_backward() const noexcept {
    return arrival_ == Arrival::in_backward || arrival_ == Arrival::left_in_backward;
  }
  void stop_thread();
  void wait_until(const std::function<bool()>& ready) const;
  void announce_complete();
  void write_notes();
  void fix_order();
  void run(const node::BucketReduction::OnChunk& on_chunk, const ChunkStep* step);

  Communicator communicator_;
  comm::SharedRegion control_;
  comm::SharedRegion region_;
  FlatLayout layout_;
  std::vector<Gradient> gradients_;  ///< [parameters]
  std::vector<Bucket> buckets_;      ///< [buckets of layout_]
  node::BucketReduction reduction_;
  node::BucketReduction::OnChunk average_;
  std::unique_ptr<GradientAllocator> allocator_;  ///< null if gradients need not lie in the region
  std::unique_ptr<BetweenNodes> nodes_;           ///< null on one node
  std::exception_ptr failure_;                    ///< what thread_ has caught between nodes
  std::unique_ptr<ProgressThread> thread_;        ///< last member, so that it is destroyed first
};

}  // namespace muster::detail::gradients
