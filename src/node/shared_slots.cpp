#include "node/shared_slots.hpp"

#include "muster/error.hpp"

#include <unistd.h>

namespace muster::detail::node {
namespace {

/// The values of a slot's flag, which is an atomic byte. tests/fault/memory-model.pml models the memory orders below.
constexpr std::uint8_t empty = 0, claimed = 1, filled = 2;

static_assert(std::atomic<std::uint8_t>::is_always_lock_free);

}  // namespace

std::vector<SharedSlots::Place> SharedSlots::places_of(std::span<const SlotGroup> groups) {
  std::vector<Place> places;
  auto next = reserved_bytes(groups);
  std::size_t flags = 0;
  for (const auto& group : groups) {
    places.push_back({group, flags, next, whole_lines(group.bytes)});
    flags += group.count;
    next += group.count * places.back().stride;
  }
  return places;
}

std::size_t SharedSlots::reserved_bytes(std::span<const SlotGroup> groups) {
  std::size_t flags = 0;
  for (const auto& group : groups) flags += group.count;
  return whole_pages(flags);
}

std::size_t SharedSlots::memory_bytes(std::span<const SlotGroup> groups) {
  auto bytes = reserved_bytes(groups);
  for (const auto& group : groups) bytes += group.count * whole_lines(group.bytes);
  return whole_pages(bytes);
}

SharedSlots::SharedSlots(std::shared_ptr<SharedSegment> segment, std::vector<SlotGroup> groups)
    : segment_(std::move(segment)), places_(places_of(groups)), process_(::getpid()) {}

std::atomic<std::uint8_t>& SharedSlots::flag(std::size_t group, std::size_t slot) const noexcept {
  return reinterpret_cast<std::atomic<std::uint8_t>*>(segment_->data())[places_[group].first_flag + slot];
}

std::span<std::byte> SharedSlots::memory(std::size_t group, std::size_t slot) const noexcept {
  const auto& place = places_[group];
  return {segment_->data() + place.first_byte + slot * place.stride, place.group.bytes};
}

const std::byte* SharedSlots::find(std::size_t group, std::size_t slot) const noexcept {
  return flag(group, slot).load(std::memory_order_acquire) == filled ? memory(group, slot).data() : nullptr;
}

std::optional<SharedSlots::Claim> SharedSlots::claim(std::size_t group, std::size_t slot) const noexcept {
  auto& own = flag(group, slot);
  auto found = empty;
  // Acquire, so that writes of an earlier claim, which was given back, come before the new ones.
  if (!own.compare_exchange_strong(found, claimed, std::memory_order_acquire, std::memory_order_relaxed)) return {};
  return Claim(this, &own, memory(group, slot));
}

bool SharedSlots::reserve(std::span<const std::byte> memory) const {
  if (::getpid() != process_ || spare_shared_memory() < memory.size()) return false;
  try {
    segment_->reserve(static_cast<std::size_t>(memory.data() - segment_->data()), memory.size());
    return true;
  } catch (const Error&) {  // /dev/shm has become full meanwhile
    return false;
  }
}

SharedSlots::Claim::~Claim() {
  if (flag_ != nullptr) flag_->store(empty, std::memory_order_release);
}

void SharedSlots::Claim::finish() noexcept { std::exchange(flag_, nullptr)->store(filled, std::memory_order_release); }

}  // namespace muster::detail::node
