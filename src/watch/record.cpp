#include "watch/record.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::watch {
namespace {

thread_local const char* current = nullptr;

}  // namespace

std::chrono::nanoseconds now() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

ScopedCallName::ScopedCallName(const char* name) noexcept : before_(std::exchange(current, name)) {}
ScopedCallName::~ScopedCallName() { current = before_; }
const char* ScopedCallName::name() noexcept { return current; }

std::string CallEntry::text() const { return name.empty() ? call.text() : name + ": " + call.text(); }

CallLog::Ticket CallLog::begin(std::uint64_t channel, std::uint64_t call_number, const Call& call,
                               const char* name) noexcept {
  using std::memory_order_relaxed;
  const Ticket ticket = newest_.fetch_add(1, memory_order_relaxed) + 1;
  auto& slot = slots_[ticket % slots];
  // If another thread is still in the middle of writing this slot, its entry stays and this call is not recorded.
  auto version = slot.version.load(memory_order_relaxed);
  if (version % 2 == 1 || !slot.version.compare_exchange_strong(version, 2 * ticket - 1, memory_order_relaxed))
    return ticket;
  std::atomic_thread_fence(std::memory_order_release);
  slot.channel.store(channel, memory_order_relaxed);
  slot.call_number.store(call_number, memory_order_relaxed);
  slot.call.store(call.encode(), memory_order_relaxed);
  slot.begun.store(now().count(), memory_order_relaxed);
  slot.ended.store(0, memory_order_relaxed);
  if (name == nullptr) name = ScopedCallName::name();
  if (name == nullptr) {
    slot.name[0].store(0, memory_order_relaxed);
  } else {
    std::array<std::uint64_t, name_words> words{};
    std::memcpy(words.data(), name, ::strnlen(name, sizeof words));
    for (std::size_t i = 0; i < name_words; ++i) slot.name[i].store(words[i], memory_order_relaxed);
  }
  slot.version.store(2 * ticket, std::memory_order_release);
  return ticket;
}

void CallLog::end(Ticket ticket) noexcept {
  auto& slot = slots_[ticket % slots];
  // Only if the slot still holds this call: a newer call may have taken it over.
  if (slot.version.load(std::memory_order_relaxed) == 2 * ticket)
    slot.ended.store(now().count(), std::memory_order_relaxed);
}

bool CallLog::read(Ticket ticket, CallEntry& entry) const {
  using std::memory_order_relaxed;
  const auto& slot = slots_[ticket % slots];
  if (slot.version.load(std::memory_order_acquire) != 2 * ticket) return false;
  entry.channel = slot.channel.load(memory_order_relaxed);
  entry.call_number = slot.call_number.load(memory_order_relaxed);
  const auto word = slot.call.load(memory_order_relaxed);
  entry.begun = std::chrono::nanoseconds(slot.begun.load(memory_order_relaxed));
  entry.ended = std::chrono::nanoseconds(slot.ended.load(memory_order_relaxed));
  std::array<std::uint64_t, name_words> words{};
  for (std::size_t i = 0; i < name_words; ++i) words[i] = slot.name[i].load(memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (slot.version.load(memory_order_relaxed) != 2 * ticket) return false;
  entry.call = Call::decode(word);
  const auto* const text = reinterpret_cast<const char*>(words.data());
  entry.name = words[0] == 0 ? "" : std::string(text, ::strnlen(text, sizeof words));
  return true;
}

std::vector<CallEntry> CallLog::last(std::size_t most) const {
  const auto newest = newest_.load(std::memory_order_acquire);
  std::vector<CallEntry> entries;
  for (auto ticket = newest; ticket > 0 && ticket + std::min(most, slots) > newest; --ticket)
    if (CallEntry entry; read(ticket, entry)) entries.push_back(std::move(entry));
  std::reverse(entries.begin(), entries.end());
  return entries;
}

std::optional<CallEntry> CallLog::find(std::uint64_t channel, std::uint64_t call_number) const {
  for (auto& entry : last())
    if (entry.channel == channel && entry.call_number == call_number) return std::move(entry);
  return std::nullopt;
}

std::size_t CallCounts::open(std::uint64_t channel) noexcept {
  const auto number = opened_.fetch_add(1, std::memory_order_relaxed) % slots;
  auto& slot = slots_[number];
  slot.channel.store(0, std::memory_order_relaxed);
  slot.call_number.store(0, std::memory_order_release);
  slot.channel.store(channel, std::memory_order_release);
  return number;
}

void CallCounts::begin(std::size_t slot, std::uint64_t channel, std::uint64_t call_number) noexcept {
  if (slots_[slot].channel.load(std::memory_order_relaxed) == channel)
    slots_[slot].call_number.store(call_number, std::memory_order_release);
}

std::optional<std::uint64_t> CallCounts::begun(std::uint64_t channel) const noexcept {
  for (const auto& slot : slots_) {
    if (slot.channel.load(std::memory_order_acquire) != channel) continue;
    const auto call_number = slot.call_number.load(std::memory_order_acquire);
    if (slot.channel.load(std::memory_order_relaxed) == channel) return call_number;
  }
  return std::nullopt;
}

void SharedText::write(const std::string& text) noexcept {
  const auto length = std::min(text.size(), longest);
  for (std::size_t i = 0; i < length; ++i) bytes_[i].store(text[i], std::memory_order_relaxed);
  length_.store(static_cast<std::uint32_t>(length), std::memory_order_release);
}

std::string SharedText::read() const {
  const std::size_t length = std::min<std::size_t>(length_.load(std::memory_order_acquire), longest);
  std::string text(length, '\0');
  for (std::size_t i = 0; i < length; ++i) text[i] = bytes_[i].load(std::memory_order_relaxed);
  return text;
}

}  // namespace muster::detail::watch
