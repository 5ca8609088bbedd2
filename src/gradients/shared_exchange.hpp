// Averages gradients in place, in node-shared memory, where backward() makes them (gradient_allocator.hpp). Each rank
// averages a part of the elements: it reads that part from all ranks and writes the average to all ranks. Small
// gradients, and gradients that cannot be averaged where they lie, are copied first. Over several nodes, parts are sent
// from where they lie (between_nodes.hpp); a rank that is alone on its node needs no shared memory.
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/between_nodes.hpp"
#include "gradients/exchange.hpp"
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

/// For parameters on the CPU. Many members: the shared memory and the buckets in it, and the progress of the current
/// round.
class SharedExchange final : public Exchange, public FusableGradients {
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
  FusableGradients* fusable() noexcept override { return this; }

  const Communicator& communicator() const noexcept override { return communicator_; }
  const FlatLayout& layout() const noexcept override { return layout_; }
  at::IntArrayRef strides(std::size_t index) const override;
  std::size_t chunk_count() const noexcept override { return reduction_.chunks(); }
  std::vector<Chunk> own_chunks() const override { return reduction_.own_chunks(); }
  int divisor() const noexcept override { return nodes_ ? 1 : communicator_.size(); }
  bool averages_early() const noexcept override { return nodes_ != nullptr; }
  Flags agree(Flags mine) override;
  bool go_on(bool valid, Flags flags, std::uint32_t word) override;
  void finish_with(const ChunkStep& step) override;
  void set_check_word(std::uint32_t word) override;
  bool all_words_equal() const override;

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
  std::size_t announced_ = 0;
  std::size_t missing_ = 0;  ///< number of gradients that have yet to be added in this round
  node::BucketReduction reduction_;
  node::BucketReduction::OnChunk average_;
  bool round_over_ = false;  ///< true if finish_with() has ended the reduction; its next call begins another one
  std::unique_ptr<GradientAllocator> allocator_;  ///< null if gradients need not lie in the region
  std::unique_ptr<BetweenNodes> nodes_;           ///< null on one node
  std::exception_ptr failure_;                    ///< what thread_ has caught between nodes
  std::unique_ptr<ProgressThread> thread_;        ///< last member, so that it is destroyed first
};

}  // namespace muster::detail::gradients
