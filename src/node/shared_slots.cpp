#include "node/shared_slots.hpp"

#include "muster/error.hpp"

#include <unistd.h>

namespace muster::detail::node {
namespace {

/// The values of a slot's flag, which is an atomic byte. tests/fault/memory-model.pml models the memory orders below.
constexpr std::uint8_t empty = 0, claimed = 1, filled = 2;

static_assert(std::atomic<std::uint8_t>::is_always_lock_free);

}  // namespace

std::vector<SharedSlots::Place> SharedSlots::places_of(std::span<const SlotArray> arrays) {
  std::vector<Place> places;
  auto next = reserved_bytes(arrays);
  std::size_t flags = 0;
  for (const auto& array : arrays) {
    places.push_back({array, flags, next, whole_lines(array.bytes)});
    flags += array.count;
    next += array.count * places.back().stride;
  }
  return places;
}

std::size_t SharedSlots::reserved_bytes(std::span<const SlotArray> arrays) {
  std::size_t flags = 0;
  for (const auto& array : arrays) flags += array.count;
  return whole_pages(flags);
}

std::size_t SharedSlots::memory_bytes(std::span<const SlotArray> arrays) {
  auto bytes = reserved_bytes(arrays);
  for (const auto& array : arrays) bytes += array.count * whole_lines(array.bytes);
  return whole_pages(bytes);
}

SharedSlots::SharedSlots(std::shared_ptr<SharedSegment> segment, std::vector<SlotArray> arrays)
    : segment_(std::move(segment)), places_(places_of(arrays)), process_(::getpid()) {}

std::atomic<std::uint8_t>& SharedSlots::flag(std::size_t array, std::size_t slot) const noexcept {
  return reinterpret_cast<std::atomic<std::uint8_t>*>(segment_->data())[places_[array].first_flag + slot];
}

std::span<std::byte> SharedSlots::memory(std::size_t array, std::size_t slot) const noexcept {
  const auto& place = places_[array];
  return {segment_->data() + place.first_byte + slot * place.stride, place.array.bytes};
}

const std::byte* SharedSlots::find(std::size_t array, std::size_t slot) const noexcept {
  return flag(array, slot).load(std::memory_order_acquire) == filled ? memory(array, slot).data() : nullptr;
}

std::optional<SharedSlots::Claim> SharedSlots::claim(std::size_t array, std::size_t slot) const noexcept {
  auto& own = flag(array, slot);
  auto found = empty;
  // Acquire, so that writes of an earlier claim, which was given back, come before the new ones.
  if (!own.compare_exchange_strong(found, claimed, std::memory_order_acquire, std::memory_order_relaxed)) return {};
  return Claim(this, &own, memory(array, slot));
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
