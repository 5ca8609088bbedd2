#include "gradients/shared_exchange.hpp"

#include "comm/wait.hpp"
#include "group/buffer.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// Where a gradient of that parameter may be reduced in place: the same order of memory on all ranks.
bool same_order(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.strides() == parameter.strides() || (gradient.is_contiguous() && parameter.is_contiguous());
}

/// A tensor like the parameter in memory that somebody else owns.
at::Tensor tensor_at(std::byte* data, const at::Tensor& parameter) {
  const auto options = parameter.options().requires_grad(false);
  return parameter.is_non_overlapping_and_dense() ? at::from_blob(data, parameter.sizes(), parameter.strides(), options)
                                                  : at::from_blob(data, parameter.sizes(), options);
}

std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// What a note says of a gradient: its use, and as which of all it came, from 1; 0 where they came at once.
constexpr int use_bits = 2;
std::uint32_t note_of(Use use, std::uint32_t place) { return static_cast<std::uint32_t>(use) | place << use_bits; }
Use use_in(std::uint32_t note) { return static_cast<Use>(note & ((1U << use_bits) - 1)); }
std::uint32_t place_in(std::uint32_t note) { return note >> use_bits; }

}  // namespace

/// A gradient's place in the shared memory, and what became of it in this pass.
struct SharedExchange::Slot {
  at::Tensor parameter;
  std::size_t block = 0;
  std::size_t offset = 0;  ///< in this rank's part of the region
  bool small = false;      ///< it is always copied; a large one only if it does not lie in the region by itself
  bool reserved = false;   ///< there is memory behind the offset
  Use use = Use::unused;
  std::uint32_t place = 0;  ///< as which of all it came
  at::Tensor copy = {};     ///< undefined where the gradient itself is reduced
  c10::Storage held = {};   ///< of that gradient: it stays while ranks may read and write it, whatever becomes of .grad
  std::byte* taken = nullptr;
};

/// A rank's part of the region: the small gradients, the allocator's blocks, and the places of the large ones, for
/// which memory is taken only when it is needed.
struct SharedExchange::Layout {
  std::vector<Slot> slots;
  std::vector<Block> blocks = {};
  std::vector<node::BlockReduction::Block> reduced = {};
  std::vector<at::Tensor> large = {};
  std::size_t allocator_offset = 0;
  std::size_t reserved = 0;
  std::size_t bytes = 0;

  explicit Layout(const std::vector<at::Tensor>& parameters) {
    for (const auto& parameter : parameters) slots.push_back({parameter});
    // In the first pass large gradients are expected from the last to the first; the small ones go together.
    std::map<comm::Dtype, std::vector<std::size_t>> small;
    for (std::size_t i = slots.size(); i-- > 0;) {
      const auto& parameter = parameters[i];
      const auto type = *group::dtype_of(parameter.scalar_type());
      slots[i].small = parameter.nbytes() < GradientAllocator::smallest || !parameter.is_non_overlapping_and_dense();
      if (slots[i].small) {
        small[type].push_back(i);
        continue;
      }
      slots[i].block = blocks.size();
      blocks.push_back({{i}});
      reduced.push_back({static_cast<std::size_t>(parameter.numel()), type});
      large.push_back(parameter);
    }
    for (auto& [type, members] : small) {
      const auto first = bytes;
      for (const auto i : members) {
        slots[i].block = blocks.size();
        slots[i].offset = bytes;
        slots[i].reserved = true;
        bytes += parameters[i].nbytes();
      }
      reduced.push_back({(bytes - first) / comm::size_of(type), type});
      blocks.push_back({std::move(members)});
      bytes = round_up(bytes);
    }
    allocator_offset = bytes;
    bytes += GradientAllocator::bytes(large);
    reserved = bytes;
    bytes += GradientAllocator::spare_bytes(large);
    for (auto& slot : slots) {
      if (slot.small) continue;
      slot.offset = bytes;
      bytes = round_up(bytes + slot.parameter.nbytes());
    }
  }
};

std::unique_ptr<SharedExchange> SharedExchange::make(const std::vector<at::Tensor>& parameters,
                                                     const Communicator& communicator, bool progress_thread) {
  if (communicator.size() == 1 || communicator.topology().num_nodes > 1 || parameters.empty()) return nullptr;
  for (const auto& parameter : parameters)
    if (!parameter.is_cpu() || !group::dtype_of(parameter.scalar_type())) return nullptr;
  Layout layout(parameters);
  const auto control_bytes =
      node::BlockReduction::memory(communicator.topology().local_size, layout.blocks.size(), layout.slots.size() + 1);
  // Of the first rank's part, all make use.
  auto control = comm::share(communicator, control_bytes, control_bytes);
  if (!control) return nullptr;
  auto region = comm::share(communicator, layout.bytes, layout.reserved);
  if (!region) return nullptr;
  return std::unique_ptr<SharedExchange>(
      new SharedExchange(std::move(layout), communicator, std::move(*control), std::move(*region), progress_thread));
}

SharedExchange::SharedExchange(Layout layout, Communicator communicator, comm::SharedRegion control,
                               comm::SharedRegion region, bool progress_thread)
    : communicator_(std::move(communicator)),
      control_(std::move(control)),
      region_(std::move(region)),
      slots_(std::move(layout.slots)),
      blocks_(std::move(layout.blocks)),
      reduction_(control_.region.base, region_.region, region_.local_rank, communicator_.size(), layout.reduced,
                 slots_.size() + 1),
      average_(node::in_place_sum(layout.reduced, 1.0 / communicator_.size())) {
  for (auto& block : blocks_) {
    const auto& first = slots_[block.slots.front()];
    if (first.small) block.data = region_.data() + first.offset;
  }
  for (auto& slot : slots_)
    if (slot.small) slot.copy = tensor_at(region_.data() + slot.offset, slot.parameter);
  if (!layout.large.empty())
    allocator_ =
        std::make_unique<GradientAllocator>(region_.data() + layout.allocator_offset, layout.large, region_.segment,
                                            [region = region_](std::byte* first, std::size_t bytes) {
                                              try {
                                                region.reserve(static_cast<std::size_t>(first - region.data()), bytes);
                                                return true;
                                              } catch (const Error&) {
                                                return false;  // the gradient is copied then
                                              }
                                            });
  if (progress_thread)
    thread_ = std::make_unique<ProgressThread>([this, average = average_] { return reduction_.help(average); });
}

SharedExchange::~SharedExchange() = default;

void SharedExchange::begin(Arrival arrival, Flags flags) {
  reduction_.begin();
  flags_ = flags;
  reduction_.write_note(slots_.size(), flags_);
  published_ = 0;
  arrival_ = arrival;
  arrived_ = 0;
  worked_on_ = false;
  for (auto& block : blocks_) block.missing = block.slots.size();
  for (auto& slot : slots_) drop_copy(slot);
  if (thread_ && arrival == Arrival::in_backward) thread_->start();
}

void SharedExchange::add(std::size_t index, const at::Tensor& gradient, Use use) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[index];
  auto& block = blocks_[slot.block];
  if (!slot.small) {
    auto* const data = gradient.defined() ? static_cast<std::byte*>(gradient.data_ptr()) : nullptr;
    const auto* const begin = region_.data();
    const bool here = data >= begin && data + slot.parameter.nbytes() <= begin + region_.region.stride;
    // What nobody may have used must stay as it is.
    if (here && use == Use::used && same_order(gradient, slot.parameter)) {
      block.data = data;
      if (arrival_ == Arrival::in_backward) slot.held = gradient.storage();
    } else {
      block.data = find_place(slot);
    }
  }
  if (slot.copy.defined()) {
    if (gradient.defined())
      slot.copy.copy_(gradient);
    else
      slot.copy.zero_();
  }
  slot.use = use;
  slot.place = arrival_ == Arrival::in_backward ? ++arrived_ : 0;
  write_note(index);
  --block.missing;
  publish_complete();
}

void SharedExchange::write_note(std::size_t index) {
  reduction_.write_note(index, note_of(slots_[index].use, slots_[index].place));
}

void SharedExchange::publish_complete() {
  const auto& order = reduction_.order();
  for (; published_ < blocks_.size() && blocks_[order[published_]].missing == 0; ++published_)
    reduction_.publish(blocks_[order[published_]].data);
}

/// Blocks come in the order in which the first rank's were complete in the first whole backward().
void SharedExchange::freeze_order() {
  if (frozen_) return;
  std::vector<std::uint32_t> complete(blocks_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto note = reduction_.note(0, i);
    if (place_in(note) == 0 || use_in(note) == Use::abandoned) return;
    auto& last = complete[slots_[i].block];
    last = std::max(last, place_in(note));
  }
  auto order = reduction_.order();
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return complete[a] < complete[b]; });
  reduction_.reorder(order);
  frozen_ = true;
}

/// A free block of the allocator if there is one: the gradient is not in it.
std::byte* SharedExchange::find_place(Slot& slot) {
  const auto bytes = slot.parameter.nbytes();
  slot.taken = allocator_->allocate(bytes);
  if (slot.taken == nullptr && !slot.reserved) {
    region_.reserve(slot.offset, bytes);
    slot.reserved = true;
  }
  auto* const place = slot.taken != nullptr ? slot.taken : region_.data() + slot.offset;
  slot.copy = tensor_at(place, slot.parameter);
  return place;
}

void SharedExchange::run(const node::BlockReduction::Work& work) {
  publish_complete();
  comm::wait_for(
      communicator_, [&] { return reduction_.advance(work); }, [] { return std::string("averaging gradients"); });
}

void SharedExchange::finish() {
  if (thread_) thread_->stop();
  run(average_);
  for (auto& slot : slots_) slot.held = {};
  freeze_order();
}

void SharedExchange::finish_with(const node::BlockReduction::Work& work) {
  if (worked_on_) {
    // Another round over the same gradients.
    reduction_.begin();
    published_ = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) write_note(i);
    reduction_.write_note(slots_.size(), flags_);
  }
  run(work);
  worked_on_ = true;
}

std::vector<SharedExchange::Placement> SharedExchange::placements() const {
  std::vector<Placement> placements;
  for (const auto& slot : slots_) {
    const auto bytes = slot.small ? slot.offset - slots_[blocks_[slot.block].slots.front()].offset : 0;
    placements.push_back(
        {slot.block, bytes / slot.parameter.element_size(), static_cast<std::size_t>(slot.parameter.numel())});
  }
  return placements;
}

int SharedExchange::users(std::size_t index) const {
  int users = 0;
  for (int r = 0; r < communicator_.size(); ++r) {
    const auto use = use_in(reduction_.note(r, index));
    if (use == Use::abandoned) return -1;
    users += use == Use::used;
  }
  return users;
}

Flags SharedExchange::flags() const {
  Flags all = 0;
  for (int r = 0; r < communicator_.size(); ++r) all |= reduction_.note(r, slots_.size());
  return all;
}

void SharedExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  auto& slot = slots_[index];
  if (!slot.copy.defined()) return;
  if (gradient.defined())
    gradient.copy_(slot.copy);
  else
    gradient = slot.copy.clone();
  drop_copy(slot);
}

void SharedExchange::drop_copy(Slot& slot) {
  if (slot.small) return;
  slot.copy.reset();
  if (slot.taken != nullptr) allocator_->deallocate(std::exchange(slot.taken, nullptr));
}

}  // namespace muster::detail::gradients
