#include "watch/trace.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <unordered_set>
#include <utility>

namespace muster::detail::watch {
namespace {

/// Holds the events of all threads of the process. Never destroyed, since threads may end after main().
struct Recorder {
  std::mutex mutex;
  std::vector<TraceEvent> ring;
  std::size_t capacity = 0;
  std::uint64_t recorded = 0;  ///< number of events so far; more than `capacity` if the oldest were replaced
  std::vector<std::string> threads;
  std::uint64_t traces_taken = 0;
  std::unordered_set<std::string> texts;  ///< see interned()
};
Recorder& recorder() {
  static auto* const only = new Recorder;
  return *only;
}

/// A thread's index in Recorder::threads. It is valid only as long as `traces_taken` equals Recorder::traces_taken.
struct ThreadIndex {
  std::uint32_t index = 0;
  std::uint64_t traces_taken = 0;
  bool is_set = false;
};
thread_local ThreadIndex this_thread;

std::string name_of_this_thread() {
  if (::gettid() == ::getpid()) return "main thread";
  std::array<char, 32> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  return name.data();
}

/// The caller holds the recorder's mutex.
std::uint32_t index_of_this_thread(Recorder& to) {
  if (!this_thread.is_set || this_thread.traces_taken != to.traces_taken) {
    this_thread = {static_cast<std::uint32_t>(to.threads.size()), to.traces_taken, true};
    to.threads.push_back(name_of_this_thread());
  }
  return this_thread.index;
}

}  // namespace

void start_trace(std::size_t capacity) {
  auto& to = recorder();
  const std::lock_guard lock(to.mutex);
  if (to.capacity == 0) {
    to.ring.reserve(capacity);
    to.capacity = capacity;
  }
  trace_state::records = true;
}

void stop_trace() noexcept { trace_state::records = false; }

Trace take_trace() {
  stop_trace();
  auto& from = recorder();
  const std::lock_guard lock(from.mutex);
  if (from.recorded > from.ring.size())  // the oldest event first
    std::rotate(from.ring.begin(), from.ring.begin() + static_cast<std::ptrdiff_t>(from.recorded % from.capacity),
                from.ring.end());
  Trace taken{.events = std::exchange(from.ring, {}),
              .threads = std::exchange(from.threads, {}),
              .dropped = from.recorded - std::min<std::uint64_t>(from.recorded, from.capacity)};
  from.capacity = 0;
  from.recorded = 0;
  ++from.traces_taken;
  return taken;
}

void record(TraceEvent event) noexcept {
  if (!is_tracing()) return;
  auto& to = recorder();
  const std::lock_guard lock(to.mutex);
  if (to.capacity == 0) return;  // the trace was taken meanwhile
  try {
    event.thread = index_of_this_thread(to);
  } catch (const std::bad_alloc&) {
    return;
  }
  if (to.ring.size() < to.capacity)
    to.ring.push_back(event);
  else
    to.ring[to.recorded % to.capacity] = event;
  ++to.recorded;
}

const char* interned(std::string_view text) {
  auto& in = recorder();
  const std::lock_guard lock(in.mutex);
  return in.texts.emplace(text).first->c_str();
}

}  // namespace muster::detail::watch
