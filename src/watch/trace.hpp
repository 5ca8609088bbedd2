// A record of what the threads of this process do, and when: the events from which a trace of a run is made
// (observe/trace_file.hpp). While nothing is recorded, a span costs the reading of one variable.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::watch {

/// Where a viewer of the trace shows an event.
enum class TraceTrack : std::uint8_t {
  thread,   ///< in the row of its thread, whose events are nested or do not overlap
  calls,    ///< collective calls, from this rank's arrival until the call is over; they may overlap
  buckets,  ///< the reduction of buckets of gradients; they may overlap
  network,  ///< exchanges between nodes; they may overlap
};

/// Something that a thread did, with its begin and its end.
struct TraceEvent {
  const char* name = "";  ///< lives as long as the process
  TraceTrack track = TraceTrack::thread;
  std::uint32_t thread = 0;               ///< index in Trace::threads
  std::int64_t begin_ns = 0, end_ns = 0;  ///< values of trace_clock()
  std::uint64_t channel = 0, call = 0;    ///< ids of a collective call, the same on all ranks; 0 for other events
  std::int64_t number = -1;               ///< number of the step or bucket; −1 if none
  std::int64_t bytes = -1;                ///< bytes that are reduced or exchanged; −1 if unknown
};

/// What was recorded.
struct Trace {
  std::vector<TraceEvent> events = {};    ///< in the order in which they were recorded
  std::vector<std::string> threads = {};  ///< names
  std::uint64_t dropped = 0;              ///< how many of the oldest events were overwritten
};

/// The steady clock of this node, in nanoseconds.
inline std::int64_t trace_clock() noexcept {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace trace_state {
inline std::atomic<bool> records{false};
}
/// True while events are recorded.
inline bool is_tracing() noexcept { return trace_state::records.load(std::memory_order_relaxed); }

/// Begins to record, or goes on. The first call, and the first after take_trace(), reserves memory for `capacity`
/// events; a later one keeps what was recorded. When there is no more room, new events replace the oldest ones.
void start_trace(std::size_t capacity);
/// Stops recording, and keeps what was recorded.
void stop_trace() noexcept;
/// Stops recording and returns what was recorded since the last take_trace().
Trace take_trace();

/// Records an event of this thread; `event.thread` is filled in. Any thread. Does nothing while nothing is recorded.
void record(TraceEvent event) noexcept;
/// Records an event that has begun and ends now. Does nothing if its begin_ns is 0, or while nothing is recorded.
inline void record_until_now(TraceEvent event) noexcept {
  if (event.begin_ns == 0 || !is_tracing()) return;
  event.end_ns = trace_clock();
  record(event);
}
/// Returns the clock for the begin_ns of an event that record_until_now() will end; 0 while nothing is recorded.
inline std::int64_t trace_begin() noexcept { return is_tracing() ? trace_clock() : 0; }
/// Returns a copy of the text that lives as long as the process; for equal texts, the same pointer.
const char* interned(std::string_view text);

/// Records an event of this thread that lasts as long as this object, if events are recorded at its begin and its end.
class TraceSpan {
 public:
  /// `name` lives as long as the process.
  explicit TraceSpan(const char* name, std::int64_t number = -1) noexcept {
    if (!is_tracing()) return;
    event_.name = name;
    event_.number = number;
    event_.begin_ns = trace_clock();
  }
  ~TraceSpan() {
    if (event_.begin_ns == 0) return;
    event_.end_ns = trace_clock();
    record(event_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  /// Says that this span is a wait in this collective call.
  void set_call(std::uint64_t channel, std::uint64_t call) noexcept {
    event_.channel = channel;
    event_.call = call;
  }

 private:
  TraceEvent event_ = {};  ///< begin_ns is 0 if events were not recorded at the begin
};

}  // namespace muster::detail::watch
