// Gradients averaged in node-shared memory, where they are: what backward() makes is born there
// (gradient_allocator.hpp), and every rank reads its share of all ranks' gradients and writes the average to all.
// Nothing is copied but what is small, or was not made by backward().
#pragma once

#include "comm/shared_memory.hpp"
#include "gradients/exchange.hpp"
#include "gradients/gradient_allocator.hpp"
#include "gradients/progress_thread.hpp"
#include "muster/communicator.hpp"
#include "node/block_reduction.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace muster::detail::gradients {

/// For parameters on the CPU of ranks of one node. A prepared optimizer may take the place of the average: it then
/// works on the gradients of all ranks itself (fused_step.hpp).
class SharedExchange final : public Exchange {
 public:
  /// Null where it cannot serve: several nodes, one rank, another device, or no room in /dev/shm. `communicator` is for
  /// this exchange alone. With `progress_thread` averages are formed while backward() computes. Collective.
  static std::unique_ptr<SharedExchange> make(const std::vector<at::Tensor>& parameters,
                                              const Communicator& communicator, bool progress_thread);
  ~SharedExchange() override;

  void begin(Arrival arrival, Note note) override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  Note noted() const override;

  /// Where a gradient stands among what is reduced as a whole.
  struct Placement {
    std::size_t block = 0;
    std::size_t first = 0;  ///< element of the block
    std::size_t count = 0;
  };
  /// [parameters]
  std::vector<Placement> placements() const;
  const node::BlockReduction& reduction() const noexcept { return reduction_; }
  const Communicator& communicator() const noexcept { return communicator_; }
  /// In place of finish(): does that work on the gradients of all ranks, which stay as they are; it may be called
  /// several times. The work may ask for users(). Collective.
  void update(const node::BlockReduction::Work& work);

 private:
  struct Slot;
  struct Layout;

  /// What is reduced as a whole: one large gradient, or all small ones of a type.
  struct Block {
    std::vector<std::size_t> slots;
    std::byte* data = nullptr;
    std::size_t missing = 0;
  };

  SharedExchange(Layout layout, Communicator communicator, comm::SharedRegion control, comm::SharedRegion region,
                 bool progress_thread);
  /// Where a large gradient is copied to that does not lie in the shared memory.
  std::byte* find_place(Slot& slot);
  void drop_copy(Slot& slot);
  void publish_complete();
  void write_note(std::size_t index);
  void freeze_order();
  void run(const node::BlockReduction::Work& work);

  Communicator communicator_;
  comm::SharedRegion control_;
  comm::SharedRegion region_;
  std::vector<Slot> slots_;  // [parameters]
  std::vector<Block> blocks_;
  std::size_t published_ = 0;
  Arrival arrival_ = Arrival::at_once;
  Note note_ = 0;
  std::uint32_t arrived_ = 0;  ///< gradients, in this pass
  bool frozen_ = false;        ///< the order in which blocks are published
  node::BlockReduction reduction_;
  node::BlockReduction::Work average_;
  bool updated_ = false;  ///< the round of this pass has ended, and another one is under way
  std::unique_ptr<GradientAllocator> allocator_;
  std::unique_ptr<ProgressThread> thread_;  ///< goes first
};

}  // namespace muster::detail::gradients
