#include "observe/trace_file.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/json.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace muster::detail::observe {
namespace {

using watch::TraceEvent;
using watch::TraceTrack;

constexpr std::size_t write_bytes = std::size_t{1} << 20;  ///< text is written as soon as there is so much of it

double microseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e3; }
double milliseconds(std::int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e6; }

/// Identifies a collective call: the channel, and the call's number on the channel.
using Call = std::pair<std::uint64_t, std::uint64_t>;

/// The arrival of the last rank at a call.
struct LastArrival {
  int rank = -1;
  std::int64_t time_ns = std::numeric_limits<std::int64_t>::min();
  int ranks = 0;  ///< number of ranks that have come to the call
};

/// Statistics of all spans that have the same name.
struct SpanSum {
  std::int64_t count = 0, total_ns = 0, longest_ns = -1, longest_begin_ns = 0;
  int longest_rank = 0;
};

/// Writes the events of a trace file. Times are in microseconds since the first event.
class TraceWriter {
 public:
  TraceWriter(std::vector<watch::Trace> traces, const TraceClocks& clocks, File& file)
      : traces_(std::move(traces)), clocks_(clocks), file_(file) {
    for (int rank = 0; rank < size(); ++rank)
      for (auto& event : traces_[static_cast<std::size_t>(rank)].events) {
        event.begin_ns = clocks.common_time(rank, event.begin_ns);
        event.end_ns = clocks.common_time(rank, event.end_ns);
        begin_ns_ = std::min(begin_ns_, event.begin_ns);
        note_arrival(rank, event);
      }
  }

  void write() {
    text_ = "{\"displayTimeUnit\": \"ms\", \"traceEvents\": [";
    for (int rank = 0; rank < size(); ++rank) {
      write_names(rank);
      for (const auto& event : traces_[static_cast<std::size_t>(rank)].events) write_event(rank, event);
    }
    text_ += "\n], \"otherData\": " + json_text(summary()) + "}\n";
    flush();
  }

 private:
  int size() const { return static_cast<int>(traces_.size()); }

  void note_arrival(int rank, const TraceEvent& event) {
    if (event.track != TraceTrack::calls) return;
    auto& last = arrivals_[{event.channel, event.call}];
    ++last.ranks;
    if (event.begin_ns > last.time_ns) last = {rank, event.begin_ns, last.ranks};
  }

  void add(const Json& event) {
    text_ += is_first_ ? "\n" : ",\n";
    is_first_ = false;
    text_ += json_text_lossy(event);
    if (text_.size() >= write_bytes) flush();
  }
  void flush() {
    file_.append(text_);
    text_.clear();
  }

  void write_names(int rank) {
    const auto& host = clocks_.topology.hosts[static_cast<std::size_t>(rank)];
    const auto name = [&](const char* what, Json args, std::uint32_t thread = 0) {
      add({{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", std::move(args)}});
    };
    name("process_name", {{"name", str("rank ", rank, " (", host, ")")}});
    name("process_sort_index", {{"sort_index", rank}});
    const auto& threads = traces_[static_cast<std::size_t>(rank)].threads;
    for (std::uint32_t thread = 0; thread < threads.size(); ++thread)
      name("thread_name", {{"name", threads[thread]}}, thread);
  }

  void write_event(int rank, const TraceEvent& event) {
    auto& sum = sums_[event.name];
    const auto duration = event.end_ns - event.begin_ns;
    ++sum.count;
    sum.total_ns += duration;
    if (duration > sum.longest_ns) {
      sum.longest_ns = duration;
      sum.longest_begin_ns = event.begin_ns;
      sum.longest_rank = rank;
    }
    Json json{{"name", event.name},
              {"pid", rank},
              {"tid", event.thread},
              {"ts", microseconds(event.begin_ns - begin_ns_)},
              {"args", args_of(rank, event)}};
    if (event.track == TraceTrack::thread) {
      json["ph"] = "X";
      json["dur"] = microseconds(duration);
      return add(json);
    }
    json["cat"] = event.track == TraceTrack::calls     ? "calls"
                  : event.track == TraceTrack::buckets ? "buckets"
                                                       : "network";
    json["id"] = ++events_;
    json["ph"] = "b";
    add(json);
    json.erase("args");
    json["ph"] = "e";
    json["ts"] = microseconds(event.end_ns - begin_ns_);
    add(json);
  }

  Json args_of(int rank, const TraceEvent& event) {
    Json args = Json::object();
    if (event.number >= 0) args["number"] = event.number;
    if (event.bytes >= 0) args["bytes"] = event.bytes;
    const auto last = arrivals_.find({event.channel, event.call});
    if (event.call == 0 || event.track != TraceTrack::thread || last == arrivals_.end()) return args;
    const auto& [late, time, ranks] = last->second;
    // If the last rank had come before this rank began to wait, this rank waits for data, not for that rank.
    if (ranks < size() || late == rank || time <= event.begin_ns) return args;
    const auto waited = std::min(time, event.end_ns) - event.begin_ns;
    args["for"] = str("rank ", late);
    args["after_ms"] = milliseconds(waited);
    waited_for_[late] += waited;
    return args;
  }

  Json summary() const {
    Json spans = Json::array(), waited_for = Json::array();
    for (const auto& [name, sum] : sums_)
      spans.push_back({{"name", name},
                       {"count", sum.count},
                       {"total_ms", milliseconds(sum.total_ns)},
                       {"longest_ms", milliseconds(sum.longest_ns)},
                       {"longest_rank", sum.longest_rank},
                       {"longest_at_ms", milliseconds(sum.longest_begin_ns - begin_ns_)}});
    for (const auto& [rank, time] : waited_for_) waited_for.push_back({{"rank", rank}, {"ms", milliseconds(time)}});
    std::uint64_t dropped = 0;
    for (const auto& trace : traces_) dropped += trace.dropped;
    std::chrono::nanoseconds error{0};
    for (const auto* clocks : {&clocks_.before, &clocks_.after})
      for (const auto& clock : *clocks) error = std::max(error, clock.error);
    return {{"ranks", size()},
            {"spans", std::move(spans)},
            {"waited_for", std::move(waited_for)},
            {"dropped_events", dropped},
            {"clock_error_ms", milliseconds(error.count())}};
  }

  std::vector<watch::Trace> traces_;  ///< of all ranks, with times of the clock of rank 0's node
  const TraceClocks& clocks_;
  File& file_;
  std::int64_t begin_ns_ = std::numeric_limits<std::int64_t>::max();
  std::map<Call, LastArrival> arrivals_;
  std::map<std::string, SpanSum> sums_;
  std::map<int, std::int64_t> waited_for_;  ///< by rank: nanoseconds that all other ranks together have waited for it
  std::int64_t events_ = 0;                 ///< number of asynchronous events
  std::string text_;
  bool is_first_ = true;
};

}  // namespace

std::string pack_trace(const watch::Trace& trace) {
  std::map<std::string, std::uint64_t> numbers;
  Json names = Json::array();
  Json::binary_t::container_type events(trace.events.size() * sizeof(TraceEvent));
  auto* into = events.data();
  for (auto event : trace.events) {
    const auto [at, is_new] = numbers.try_emplace(event.name, names.size());
    if (is_new) names.push_back(event.name);
    std::memcpy(into, &event, sizeof event);
    std::memcpy(into + offsetof(TraceEvent, name), &at->second, sizeof at->second);
    into += sizeof event;
  }
  return json_to_cbor({{"names", std::move(names)},
                       {"threads", trace.threads},
                       {"dropped", trace.dropped},
                       {"events", Json::binary(std::move(events))}});
}

watch::Trace unpack_trace(std::string_view bytes) {
  static_assert(sizeof(const char*) == sizeof(std::uint64_t));
  const auto packed = json_from_cbor(bytes);
  std::vector<const char*> names;
  for (const auto& name : packed["names"]) names.push_back(watch::interned(name.get_ref<const std::string&>()));
  const auto& events = packed["events"].get_binary();
  watch::Trace trace{.events = std::vector<TraceEvent>(events.size() / sizeof(TraceEvent)),
                     .threads = packed["threads"],
                     .dropped = packed["dropped"]};
  const auto* from = events.data();
  for (auto& event : trace.events) {
    std::uint64_t number = 0;
    std::memcpy(&number, from + offsetof(TraceEvent, name), sizeof number);
    std::memcpy(&event, from, sizeof event);
    event.name = names.at(number);
    from += sizeof event;
  }
  return trace;
}

std::int64_t TraceClocks::common_time(int rank, std::int64_t time_ns) const {
  const auto node = static_cast<std::size_t>(topology.node_of_rank[static_cast<std::size_t>(rank)]);
  const auto &first = before[node], &second = after[node];
  // Between the two measurements, the offset is interpolated linearly.
  const auto begin = (first.when - first.offset).time_since_epoch(),
             end = (second.when - second.offset).time_since_epoch();
  const double part = end > begin ? static_cast<double>(time_ns - std::chrono::nanoseconds(begin).count()) /
                                        static_cast<double>(std::chrono::nanoseconds(end - begin).count())
                                  : 0.0;
  return time_ns + first.offset.count() +
         static_cast<std::int64_t>(part * static_cast<double>((second.offset - first.offset).count()));
}

void write_trace_file(const std::filesystem::path& path, const std::vector<watch::Trace>& traces,
                      const TraceClocks& clocks) {
  write_file(path, [&](File& file) { TraceWriter(traces, clocks, file).write(); });
}

}  // namespace muster::detail::observe
