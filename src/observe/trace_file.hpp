// Writes the trace of all ranks, on one clock, to a file in Chrome's trace event format (JSON object format), which
// ui.perfetto.dev and chrome://tracing read. Each rank is a process in the file, and each of its threads is a thread.
// Collective calls, reductions of buckets and exchanges between nodes are asynchronous events ("b" and "e"), since they
// overlap.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
//
// If a rank waits in a span for a collective call, the span's args have the rank that came last to the call ("for") and
// how long after the span's begin it came, at most until the span's end ("after_ms"). The file's otherData has sums.
// "spans": for each name, the number of spans, their total time, and the longest one with its rank and time.
// "waited_for": for each rank, how long other ranks have waited for it.
#pragma once

#include "comm/clock_offset.hpp"
#include "muster/communicator.hpp"
#include "watch/trace.hpp"

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::observe {

/// Pack a trace into bytes for another rank, and unpack it there. unpack_trace() interns the names.
std::string pack_trace(const watch::Trace& trace);
watch::Trace unpack_trace(std::string_view bytes);

/// The clocks of the ranks' nodes, measured before and after the recorded steps.
struct TraceClocks {
  const Topology& topology;
  const std::vector<comm::ClockOffset>&before, &after;  ///< [num_nodes]

  /// Returns a time of `rank`'s clock as a time of the clock of rank 0's node.
  std::int64_t common_time(int rank, std::int64_t time_ns) const;
};

/// Writes or replaces the file. `traces`: of all ranks.
void write_trace_file(const std::filesystem::path& path, const std::vector<watch::Trace>& traces,
                      const TraceClocks& clocks);

}  // namespace muster::detail::observe
