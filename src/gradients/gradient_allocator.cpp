#include "gradients/gradient_allocator.hpp"

#include "node/shared_segment.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace muster::detail::gradients {

struct GradientAllocator::Pool {
  std::byte* begin;
  std::byte* end;
  std::shared_ptr<void> lifetime;
  std::mutex mutex = {};
  /// Free blocks by size; allocate() takes the last one of a list.
  std::map<std::size_t, std::vector<std::byte*>> free = {};
  std::map<std::byte*, std::size_t> sizes = {};  ///< bytes of each block
  /// Spare blocks for which no memory is reserved yet; each is the first of its list in `free`.
  std::set<std::byte*> spare = {};
  std::function<bool(std::byte*, std::size_t)> reserve = {};
  std::unordered_map<const void*, std::size_t> size_of_gradient = {};  ///< bytes of its gradient, by parameter
  std::size_t taken = 0;                                               ///< number of blocks in use
  bool open = true;                                                    ///< true while its GradientAllocator lives

  std::byte* allocate(std::size_t size) {
    const std::lock_guard lock(mutex);
    const auto found = free.find(size);
    if (!open || found == free.end() || found->second.empty()) return nullptr;
    auto* block = found->second.back();
    found->second.pop_back();
    if (found->second.empty() && spare.erase(block) > 0 && !reserve(block, size)) return nullptr;
    ++taken;
    return block;
  }

  /// True if this was the last block in use and the pool is closed: the pool can then be removed.
  bool deallocate(std::byte* block) {
    const std::lock_guard lock(mutex);
    free[sizes.at(block)].push_back(block);
    return --taken == 0 && !open;
  }

  /// True if no block is in use: the pool can then be removed.
  bool close() {
    const std::lock_guard lock(mutex);
    open = false;
    return taken == 0;
  }
};

namespace {

/// The pools that are open or have blocks in use.
class Pools {
 public:
  void add(std::shared_ptr<GradientAllocator::Pool> pool) {
    const std::unique_lock lock(mutex_);
    lowest_ = std::min(lowest_.load(), pool->begin);
    highest_ = std::max(highest_.load(), pool->end);
    all_.push_back(std::move(pool));
    number_ = all_.size();
  }

  void remove(const GradientAllocator::Pool* pool) {
    const std::unique_lock lock(mutex_);
    std::erase_if(all_, [&](const auto& each) { return each.get() == pool; });
    number_ = all_.size();
  }

  bool empty() const noexcept { return number_.load(std::memory_order_relaxed) == 0; }

  /// Returns a block for a tensor that autograd's `node` allocates, if the tensor may be a parameter's gradient; else
  /// null.
  std::byte* allocate(std::size_t size, const torch::autograd::Node& node) {
    const std::shared_lock lock(mutex_);
    return allocate_towards(size, node, max_distance);
  }

  /// Returns false if the memory is no block of a pool.
  bool deallocate(std::byte* block) {
    // Most tensors lie outside of all pools, so this test spares them the search.
    if (block < lowest_.load(std::memory_order_relaxed) || block >= highest_.load(std::memory_order_relaxed))
      return false;
    std::shared_ptr<GradientAllocator::Pool> from;
    {
      const std::shared_lock lock(mutex_);
      for (const auto& pool : all_)
        if (block >= pool->begin && block < pool->end) from = pool;
    }
    if (!from) return false;
    if (from->deallocate(block)) remove(from.get());
    return true;
  }

 private:
  /// Greatest number of edges of autograd's graph from the node that makes a gradient to the node that accumulates it.
  /// In a linear layer, a transpose is between them.
  static constexpr int max_distance = 3;

  std::byte* allocate_towards(std::size_t size, const torch::autograd::Node& node, int distance) {
    if (const auto* accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node)) {
      const void* const parameter = accumulates->variable.unsafeGetTensorImpl();
      // A closed pool may list a destroyed parameter that had the same address, so all pools are asked.
      for (const auto& pool : all_) {
        const auto found = pool->size_of_gradient.find(parameter);
        if (found != pool->size_of_gradient.end() && found->second == size)
          if (auto* block = pool->allocate(size)) return block;
      }
      return nullptr;
    }
    if (distance == 0) return nullptr;
    for (const auto& edge : node.next_edges())
      if (edge.function)
        if (auto* block = allocate_towards(size, *edge.function, distance - 1)) return block;
    return nullptr;
  }

  std::shared_mutex mutex_;
  std::vector<std::shared_ptr<GradientAllocator::Pool>> all_;
  std::atomic<std::size_t> number_{0};
  // All pools lie between these addresses.
  std::atomic<std::byte*> lowest_{reinterpret_cast<std::byte*>(~std::uintptr_t{0})}, highest_{nullptr};
};

/// Never destroyed, since tensors may be freed after all other objects of the process.
Pools& pools() {
  static auto* all = new Pools;
  return *all;
}

void release(void* data);

/// Replaces torch's own allocator until the process ends.
class TorchAllocator final : public c10::Allocator {
 public:
  explicit TorchAllocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(std::size_t size) override {
    if (size >= GradientAllocator::smallest && !pools().empty())
      if (const auto node = torch::autograd::get_current_node())
        if (void* const block = pools().allocate(size, *node)) return {block, block, &release, c10::kCPU};
    // One function frees the tensors of both allocators; it tells them apart by their address. So the tensor of torch's
    // allocator must be freed by its address alone.
    auto data = before_->allocate(size);
    void* const memory = data.release_context();
    return {memory, memory, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

  void release_before(void* data) const { before_->raw_deleter()(data); }

 private:
  c10::Allocator* before_;
};

/// Installs a TorchAllocator at the first call. Returns null if torch's own allocator cannot free memory by address.
TorchAllocator* torch_allocator() {
  static auto* installed = []() -> TorchAllocator* {
    auto* before = c10::GetCPUAllocator();
    if (before->raw_deleter() == nullptr) return nullptr;
    auto* ours = new TorchAllocator(before);
    c10::SetCPUAllocator(ours, 100);
    return ours;
  }();
  return installed;
}

void release(void* data) {
  if (!pools().deallocate(static_cast<std::byte*>(data))) torch_allocator()->release_before(data);
}

}  // namespace

std::size_t GradientAllocator::bytes(const std::vector<at::Tensor>& parameters) {
  std::size_t sum = 0;
  for (const auto& parameter : parameters) sum += node::whole_lines(parameter.nbytes());
  return sum;
}

std::size_t GradientAllocator::spare_bytes(const std::vector<at::Tensor>& parameters) {
  std::set<std::size_t> sizes;
  std::size_t sum = 0;
  for (const auto& parameter : parameters)
    if (sizes.insert(parameter.nbytes()).second) sum += node::whole_lines(parameter.nbytes());
  return sum;
}

GradientAllocator::GradientAllocator(std::byte* memory, const std::vector<at::Tensor>& parameters,
                                     std::shared_ptr<void> lifetime,
                                     std::function<bool(std::byte*, std::size_t)> reserve)
    : pool_(new Pool{memory, memory + bytes(parameters) + spare_bytes(parameters), std::move(lifetime)}) {
  pool_->reserve = std::move(reserve);
  for (const auto& parameter : parameters) {
    const auto size = parameter.nbytes();
    pool_->free[size].push_back(memory);
    pool_->sizes[memory] = size;
    pool_->size_of_gradient[parameter.unsafeGetTensorImpl()] = size;
    memory += node::whole_lines(size);
  }
  for (auto& [size, blocks] : pool_->free) {
    blocks.insert(blocks.begin(), memory);
    pool_->spare.insert(memory);
    pool_->sizes[memory] = size;
    memory += node::whole_lines(size);
  }
  if (torch_allocator() != nullptr) pools().add(pool_);
}

GradientAllocator::~GradientAllocator() {
  if (pool_->close()) pools().remove(pool_.get());
}

std::byte* GradientAllocator::allocate(std::size_t size) { return pool_->allocate(size); }

void GradientAllocator::deallocate(std::byte* block) { pool_->deallocate(block); }

}  // namespace muster::detail::gradients
