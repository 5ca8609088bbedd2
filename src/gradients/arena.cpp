#include "gradients/arena.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace muster::detail::gradients {

struct Arena::Blocks {
  std::byte* begin;
  std::byte* end;
  std::shared_ptr<void> owner;
  std::mutex mutex = {};
  std::map<std::size_t, std::vector<std::byte*>> free = {};  ///< by size
  std::map<std::byte*, std::size_t> sizes = {};
  std::map<std::size_t, std::byte*> spare = {};  ///< by size; no memory has been taken for it yet
  std::function<bool(std::byte*, std::size_t)> reserve = {};
  std::unordered_map<const void*, std::size_t> size_of_gradient = {};  ///< by parameter
  std::size_t taken = 0;
  bool open = true;  ///< its arena lives

  std::byte* take(std::size_t size) {
    const std::lock_guard lock(mutex);
    const auto found = free.find(size);
    if (!open || found == free.end()) return nullptr;
    if (found->second.empty()) add_spare(size, found->second);
    if (found->second.empty()) return nullptr;
    auto* block = found->second.back();
    found->second.pop_back();
    ++taken;
    return block;
  }

  void add_spare(std::size_t size, std::vector<std::byte*>& to) {
    const auto found = spare.find(size);
    if (found == spare.end()) return;
    auto* const block = found->second;
    spare.erase(found);
    if (!reserve(block, size)) return;
    sizes[block] = size;
    to.push_back(block);
  }

  /// Whether nobody will ask for it any more.
  bool give_back(std::byte* block) {
    const std::lock_guard lock(mutex);
    free[sizes.at(block)].push_back(block);
    return --taken == 0 && !open;
  }

  bool close() {
    const std::lock_guard lock(mutex);
    open = false;
    return taken == 0;
  }
};

namespace {

std::size_t room_for(std::size_t size) {
  constexpr std::size_t line = 64;
  return (size + line - 1) / line * line;
}

/// The arenas that blocks come from or may still be given back to.
class Arenas {
 public:
  void add(std::shared_ptr<Arena::Blocks> blocks) {
    const std::unique_lock lock(mutex_);
    lowest_ = std::min(lowest_.load(), blocks->begin);
    highest_ = std::max(highest_.load(), blocks->end);
    all_.push_back(std::move(blocks));
    number_ = all_.size();
  }

  void remove(const Arena::Blocks* blocks) {
    const std::unique_lock lock(mutex_);
    std::erase_if(all_, [&](const auto& each) { return each.get() == blocks; });
    number_ = all_.size();
  }

  bool empty() const noexcept { return number_.load(std::memory_order_relaxed) == 0; }

  /// A block for what the node makes, if that may be the gradient of a parameter.
  std::byte* take(std::size_t size, const torch::autograd::Node& node) {
    const std::shared_lock lock(mutex_);
    return take_towards(size, node, farthest);
  }

  /// False if it is not a block of an arena.
  bool give_back(std::byte* block) {
    // Most frees need no look at the list.
    if (block < lowest_.load(std::memory_order_relaxed) || block >= highest_.load(std::memory_order_relaxed))
      return false;
    std::shared_ptr<Arena::Blocks> from;
    {
      const std::shared_lock lock(mutex_);
      for (const auto& blocks : all_)
        if (block >= blocks->begin && block < blocks->end) from = blocks;
    }
    if (!from) return false;
    if (from->give_back(block)) remove(from.get());
    return true;
  }

 private:
  /// Nodes between the one that makes a gradient and the one that accumulates it, such as a linear layer's transpose.
  static constexpr int farthest = 3;

  std::byte* take_towards(std::size_t size, const torch::autograd::Node& node, int distance) {
    if (const auto* accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node)) {
      const void* const parameter = accumulates->variable.unsafeGetTensorImpl();
      for (const auto& blocks : all_) {
        const auto found = blocks->size_of_gradient.find(parameter);
        if (found != blocks->size_of_gradient.end() && found->second == size) return blocks->take(size);
      }
      return nullptr;
    }
    if (distance == 0) return nullptr;
    for (const auto& edge : node.next_edges())
      if (edge.function)
        if (auto* block = take_towards(size, *edge.function, distance - 1)) return block;
    return nullptr;
  }

  std::shared_mutex mutex_;
  std::vector<std::shared_ptr<Arena::Blocks>> all_;
  std::atomic<std::size_t> number_{0};
  // They all lie in between.
  std::atomic<std::byte*> lowest_{reinterpret_cast<std::byte*>(~std::uintptr_t{0})}, highest_{nullptr};
};

/// Never destroyed: tensors may be freed after everything else of the process.
Arenas& arenas() {
  static auto* all = new Arenas;
  return *all;
}

void release(void* data);

/// In place of torch's own allocator, for good.
class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(std::size_t size) override {
    if (size >= Arena::smallest && !arenas().empty())
      if (const auto node = torch::autograd::get_current_node())
        if (void* const block = arenas().take(size, *node)) return {block, block, &release, c10::kCPU};
    // All tensors are freed by one function, which tells by the address where they came from.
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

/// Installed by the first arena. None where torch's own allocator does not let its memory be freed by address.
Allocator* allocator() {
  static auto* installed = []() -> Allocator* {
    auto* before = c10::GetCPUAllocator();
    if (before->raw_deleter() == nullptr) return nullptr;
    auto* ours = new Allocator(before);
    c10::SetCPUAllocator(ours, 100);
    return ours;
  }();
  return installed;
}

void release(void* data) {
  if (!arenas().give_back(static_cast<std::byte*>(data))) allocator()->release_before(data);
}

}  // namespace

std::size_t Arena::bytes(const std::vector<at::Tensor>& parameters) {
  std::size_t sum = 0;
  for (const auto& parameter : parameters) sum += room_for(parameter.nbytes());
  return sum;
}

std::size_t Arena::spare_bytes(const std::vector<at::Tensor>& parameters) {
  std::set<std::size_t> sizes;
  for (const auto& parameter : parameters) sizes.insert(parameter.nbytes());
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0},
                         [](std::size_t sum, std::size_t size) { return sum + room_for(size); });
}

Arena::Arena(std::byte* memory, const std::vector<at::Tensor>& parameters, std::shared_ptr<void> owner,
             std::function<bool(std::byte*, std::size_t)> reserve)
    : blocks_(new Blocks{memory, memory + bytes(parameters) + spare_bytes(parameters), std::move(owner)}) {
  blocks_->reserve = std::move(reserve);
  for (const auto& parameter : parameters) {
    const auto size = parameter.nbytes();
    blocks_->free[size].push_back(memory);
    blocks_->sizes[memory] = size;
    blocks_->size_of_gradient[parameter.unsafeGetTensorImpl()] = size;
    memory += room_for(size);
  }
  for (const auto& [size, blocks] : blocks_->free) {
    blocks_->spare[size] = memory;
    memory += room_for(size);
  }
  if (allocator() != nullptr) arenas().add(blocks_);
}

Arena::~Arena() {
  if (blocks_->close()) arenas().remove(blocks_.get());
}

std::byte* Arena::take(std::size_t size) { return blocks_->take(size); }

void Arena::give_back(std::byte* block) {
  if (blocks_->give_back(block)) arenas().remove(blocks_.get());
}

}  // namespace muster::detail::gradients
