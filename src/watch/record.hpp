// A rank's record of what it is doing: its last calls, its step, and, on request, its main thread's stack. The record
// is in memory that all ranks of the node map, so they can read it even if the rank is stopped or dead. Writing takes
// some tens of nanoseconds and no lock. All-zero memory is a valid empty record.
#pragma once

#include "base/export.hpp"
#include "node/call.hpp"
#include "watch/step_log.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::watch {

using node::Call;

/// The time since the node has started, the same for all of its processes. Cheap; accurate to a few milliseconds.
std::chrono::nanoseconds now() noexcept;

/// A recorded call.
struct CallEntry {
  std::uint64_t channel = 0;      ///< id of the communicator, the same on all of its ranks
  std::uint64_t call_number = 0;  ///< number among the collective calls of the channel, from 1; 0 for messages
  Call call;
  std::string name;  ///< the caller's name for it; may be empty
  std::chrono::nanoseconds begun{0};
  std::chrono::nanoseconds ended{0};  ///< 0 while the call is under way

  /// As in "report: all_gather(uint8 [7])".
  std::string text() const;
};

/// The last calls of a rank. Any thread of its process writes; any process that maps the memory reads.
class CallLog {
 public:
  /// The number of a recorded call, from 1, in the order in which the calls have begun.
  using Ticket = std::uint64_t;
  static constexpr std::size_t slots = 128;

  /// Records that a call begins. `name`: the caller's name for it, or null for that of the ScopedCallName.
  Ticket begin(std::uint64_t channel, std::uint64_t call_number, const Call& call, const char* name) noexcept;
  void end(Ticket ticket) noexcept;
  /// Returns up to `most` of the last calls, the oldest first. Entries that are being written are left out.
  std::vector<CallEntry> last(std::size_t most = slots) const;
  /// Returns the call with this number on the channel, if it is still recorded.
  std::optional<CallEntry> find(std::uint64_t channel, std::uint64_t call_number) const;

 private:
  static constexpr std::size_t name_words = 4;
  struct alignas(128) Slot {
    std::atomic<std::uint64_t> version;  ///< 2 * ticket if the entry is complete, 2 * ticket - 1 while it is written
    std::atomic<std::uint64_t> channel, call_number, call;
    std::atomic<std::int64_t> begun, ended;
    std::array<std::atomic<std::uint64_t>, name_words> name;
  };
  /// Copies the entry of that ticket. False if its slot holds another entry or is being written.
  bool read(Ticket ticket, CallEntry& entry) const;

  std::atomic<Ticket> newest_;
  std::array<Slot, slots> slots_;
};

/// The number of collective calls that this rank has begun on each of the last `slots` channels that it has opened.
class CallCounts {
 public:
  static constexpr std::size_t slots = 64;

  /// Registers the channel and returns its slot for begin().
  std::size_t open(std::uint64_t channel) noexcept;
  void begin(std::size_t slot, std::uint64_t channel, std::uint64_t call_number) noexcept;
  /// Returns the last call number that has begun on the channel, 0 if none has. Empty if the channel is not, or no
  /// longer, registered.
  std::optional<std::uint64_t> begun(std::uint64_t channel) const noexcept;

 private:
  struct Slot {
    std::atomic<std::uint64_t> channel, call_number;
  };
  std::atomic<std::size_t> opened_;
  std::array<Slot, slots> slots_;
};

/// A text that one process writes and others read.
class SharedText {
 public:
  static constexpr std::size_t longest = 6 * 1024;
  void write(const std::string& text) noexcept;
  std::string read() const;

 private:
  std::atomic<std::uint32_t> length_;
  std::array<std::atomic<char>, longest> bytes_;
};

/// The record of one rank: plain words in shared memory, a member for each fact.
struct Record {
  std::atomic<std::int32_t> process;  ///< process id
  std::atomic<std::int64_t> started;  ///< start_time_of(process), since the id may be reused by another process
  std::atomic<std::int64_t> step, epoch;
  std::atomic<std::int64_t> busy_until;  ///< until when the others wait for this rank (keep_alive()); in ns of now()
  /// The call in which the main thread has waited for at least 100 ms; call number 0 if there is none.
  std::atomic<std::uint64_t> waits_channel, waits_call_number;
  /// Another rank increments `stack_requests` to ask for the main thread's stack. The rank writes `stack` and then sets
  /// `stack_replies` to the value of `stack_requests`. Both are futexes.
  std::atomic<std::uint32_t> stack_requests, stack_replies;
  std::atomic<bool> is_answering;  ///< true while a thread of the rank answers stack requests
  SharedText stack;
  CallCounts call_counts;
  CallLog calls;
  StepLog steps;
};

/// While it lives, calls of this thread are recorded under `name`, unless they have a name of their own.
class MUSTER_INTERNAL_API ScopedCallName {
 public:
  /// `name` must have static storage.
  explicit ScopedCallName(const char* name) noexcept;
  ~ScopedCallName();
  ScopedCallName(const ScopedCallName&) = delete;
  ScopedCallName& operator=(const ScopedCallName&) = delete;

  /// Returns the name of the innermost scope of this thread; null if there is none.
  static const char* name() noexcept;

 private:
  const char* before_;
};

}  // namespace muster::detail::watch
