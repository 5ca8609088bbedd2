// Gradients averaged in node-shared memory, where they are: what backward() makes is born there (arena.hpp), and every
// rank reads its share of all ranks' gradients and writes the average to all. Nothing is copied but what is small, or
// was not made by backward().
#pragma once

#include "comm/shared_memory.hpp"
#include "model/arena.hpp"
#include "model/exchange.hpp"
#include "muster/communicator.hpp"
#include "node/block_reduction.hpp"

#include <cstddef>
#include <memory>
#include <vector>

namespace muster::model {

/// For parameters on the CPU of ranks of one node.
class SharedExchange final : public Exchange {
 public:
  /// Null where it cannot serve: several nodes, one rank, another device, or no room in /dev/shm. `communicator` is for
  /// this exchange alone. Collective.
  static std::unique_ptr<SharedExchange> make(const std::vector<at::Tensor>& parameters,
                                              const Communicator& communicator);
  ~SharedExchange() override;

  void begin() override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;

 private:
  struct Slot;
  struct Layout;

  /// What is reduced as a whole: one large gradient, or all small ones of a type.
  struct Block {
    std::vector<std::size_t> slots;
    std::byte* data = nullptr;
    std::size_t missing = 0;
  };

  SharedExchange(Layout layout, Communicator communicator, comm::SharedRegion control, comm::SharedRegion region);
  /// Where a large gradient is copied to that does not lie in the shared memory.
  std::byte* find_place(Slot& slot);
  void drop_copy(Slot& slot);

  Communicator communicator_;
  comm::SharedRegion control_;
  comm::SharedRegion region_;
  std::vector<Slot> slots_;    // [parameters]
  std::vector<Block> blocks_;  // in the order in which they are published
  std::size_t published_ = 0;
  node::BlockReduction reduction_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace muster::model
