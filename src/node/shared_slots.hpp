// Memory of a node in slots. One rank fills a slot, once, and all ranks of the node read it.
#pragma once

#include "node/shared_segment.hpp"

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::node {

/// Slots of one size.
struct SlotArray {
  std::size_t count = 0;
  std::size_t bytes = 0;  ///< size of each slot
};

/// Slots in a segment that all ranks of a node map. Any rank may claim an empty slot and fill it. Once it has filled
/// the slot, every rank reads it in place, and it never changes again. No rank waits for another: find() does not
/// return a slot that is claimed and not filled, not even if the rank that claimed it was killed. Thread-safe.
class SharedSlots {
 public:
  class Claim;

  /// Bytes of a segment with these slots. A segment of zeroes has empty slots. reserved_bytes(): how many bytes at its
  /// beginning must be reserved before it is used.
  static std::size_t memory_bytes(std::span<const SlotArray> arrays);
  static std::size_t reserved_bytes(std::span<const SlotArray> arrays);

  /// `segment`: memory_bytes(arrays) long. All its users give the same arrays.
  SharedSlots(std::shared_ptr<SharedSegment> segment, std::vector<SlotArray> arrays);

  /// The content of a filled slot, or null. Slots are numbered from 0 in each array.
  const std::byte* find(std::size_t array, std::size_t slot) const noexcept;
  /// Claims a slot if it is empty.
  std::optional<Claim> claim(std::size_t array, std::size_t slot) const noexcept;

 private:
  /// Where an array lies in the segment, as offsets in bytes.
  struct Place {
    SlotArray array;
    std::size_t first_flag = 0, first_byte = 0, stride = 0;
  };
  static std::vector<Place> places_of(std::span<const SlotArray> arrays);
  std::atomic<std::uint8_t>& flag(std::size_t array, std::size_t slot) const noexcept;
  std::span<std::byte> memory(std::size_t array, std::size_t slot) const noexcept;
  bool reserve(std::span<const std::byte> memory) const;

  std::shared_ptr<SharedSegment> segment_;
  std::vector<Place> places_;
  pid_t process_;  ///< the process that has mapped the segment, to recognise a child of fork()
};

/// The right to fill a slot. A claim that is destroyed before finish() gives the slot back, empty. The SharedSlots must
/// outlive it.
class SharedSlots::Claim {
 public:
  Claim(Claim&& other) noexcept
      : slots_(other.slots_), flag_(std::exchange(other.flag_, nullptr)), memory_(other.memory_) {}
  Claim& operator=(Claim&&) = delete;
  ~Claim();

  /// Reserves the slot's memory; nothing may be written there before. False if /dev/shm has too little left, see
  /// spare_shared_memory(), or in a child of fork(), whose writes no other process would see.
  bool reserve() const { return slots_->reserve(memory_); }
  std::span<std::byte> memory() const noexcept { return memory_; }
  /// Lets all ranks read the slot.
  void finish() noexcept;

 private:
  friend class SharedSlots;
  Claim(const SharedSlots* slots, std::atomic<std::uint8_t>* flag, std::span<std::byte> memory) noexcept
      : slots_(slots), flag_(flag), memory_(memory) {}

  const SharedSlots* slots_;
  std::atomic<std::uint8_t>* flag_;  ///< null after finish()
  std::span<std::byte> memory_;
};

}  // namespace muster::detail::node
