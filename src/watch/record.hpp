// What a rank does, in memory that all ranks of its node map, so that they can read it even when the rank is stopped or
// dead: its last calls, its step, where its main thread stands when somebody asks. Writing takes some tens of
// nanoseconds and no lock; zeroes are the valid first state of all of it.
#pragma once

#include "node/call.hpp"

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

/// Since the node has started, the same for all of its processes; good to a few milliseconds, and cheap.
std::chrono::nanoseconds now() noexcept;

/// A call as the record has it.
struct Entry {
  std::uint64_t channel = 0;  ///< the communicator, the same number on all of its ranks
  std::uint64_t turn = 0;     ///< among the collective calls of the channel, from 1; 0 for messages
  Call call;
  std::string name;  ///< what the caller calls it; may be empty
  std::chrono::nanoseconds begun{0};
  std::chrono::nanoseconds ended{0};  ///< 0 while it is under way

  /// As in "report: all_gather(uint8 [7])".
  std::string text() const;
};

/// The last calls. Any thread of one process writes, whoever maps it reads.
class Calls {
 public:
  using Ticket = std::uint64_t;
  static constexpr std::size_t slots = 128;

  Ticket begin(std::uint64_t channel, std::uint64_t turn, const Call& call, const char* name) noexcept;
  void end(Ticket ticket) noexcept;
  /// The last ones, the oldest first; what is being written meanwhile is left out.
  std::vector<Entry> last(std::size_t most = slots) const;
  /// The one of that turn of the channel, if it is still known.
  std::optional<Entry> find(std::uint64_t channel, std::uint64_t turn) const;

 private:
  static constexpr std::size_t name_words = 4;
  struct alignas(128) Slot {
    std::atomic<std::uint64_t> version;  ///< twice its ticket when it is whole, one less while it is written
    std::atomic<std::uint64_t> channel, turn, call;
    std::atomic<std::int64_t> begun, ended;
    std::array<std::atomic<std::uint64_t>, name_words> name;
  };
  /// Whether the slot holds that ticket, whole.
  bool read(Ticket ticket, Entry& entry) const;

  std::atomic<Ticket> newest_;
  std::array<Slot, slots> slots_;
};

/// How far this rank is in each channel, those of the last ones that it opened.
class Turns {
 public:
  static constexpr std::size_t slots = 64;

  /// The channel's slot for begin().
  std::size_t open(std::uint64_t channel) noexcept;
  void begin(std::size_t slot, std::uint64_t channel, std::uint64_t turn) noexcept;
  /// The last turn that has begun there, 0 where none has; nothing where the channel is not known (any more).
  std::optional<std::uint64_t> begun(std::uint64_t channel) const noexcept;

 private:
  struct Slot {
    std::atomic<std::uint64_t> channel, turn;
  };
  std::atomic<std::size_t> opened_;
  std::array<Slot, slots> slots_;
};

/// A text that one process writes and others read.
class Text {
 public:
  static constexpr std::size_t longest = 6 * 1024;
  void write(const std::string& text) noexcept;
  std::string read() const;

 private:
  std::atomic<std::uint32_t> length_;
  std::array<std::atomic<char>, longest> bytes_;
};

/// Of one rank.
struct Record {
  std::atomic<std::int32_t> process;
  std::atomic<std::int64_t> started;  ///< the process, by its node's clock: its number may be another's later
  std::atomic<std::int64_t> step, epoch;
  std::atomic<std::int64_t> busy_until;  ///< announced; in nanoseconds of now()
  /// The call that its main thread has waited in for some time; turn 0 where there is none.
  std::atomic<std::uint64_t> waits_channel, waits_turn;
  /// Others raise `asked` for where the main thread stands; the rank writes it and says so in `answered`. Both are
  /// futexes.
  std::atomic<std::uint32_t> asked, answered;
  std::atomic<bool> answers;  ///< whether anybody is there to
  Text stack;
  Turns turns;
  Calls calls;
};

/// While it lives, calls of this thread that have no name of their own are called so.
class During {
 public:
  /// `name` is of static storage.
  explicit During(const char* name) noexcept;
  ~During();
  During(const During&) = delete;
  During& operator=(const During&) = delete;

  static const char* name() noexcept;

 private:
  const char* before_;
};

}  // namespace muster::detail::watch
