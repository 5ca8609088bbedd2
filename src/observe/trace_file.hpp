// The trace of all ranks on one clock, as a file in Chrome's trace event format (JSON object format), which
// ui.perfetto.dev and chrome://tracing read. A process is a rank; a thread is a thread of it; collective calls, the
// reductions of buckets and exchanges between nodes are asynchronous events ("b" and "e"), since they overlap.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
//
// A span in which a rank waits has, in its args, the rank that came last to the call ("for"), and after how long
// ("after_ms"). The file's otherData has sums: "spans", for each name how many there are, their time together, and the
// longest with its rank and time; "waited_for", for each rank how long others have waited for it.
#pragma once

#include "comm/clock_offset.hpp"
#include "muster/communicator.hpp"
#include "watch/trace.hpp"

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::observe {

/// A trace as bytes, for another rank, and back. unpack_trace() interns the names.
std::string pack_trace(const watch::Trace& trace);
watch::Trace unpack_trace(std::string_view bytes);

/// The clocks of the ranks' nodes before and after the recorded steps.
struct TraceClocks {
  const Topology& topology;
  const std::vector<comm::ClockOffset>&before, &after;  ///< [num_nodes]

  /// Returns the time by the clock of rank 0's node.
  std::int64_t common_time(int rank, std::int64_t time_ns) const;
};

/// `traces`: of all ranks. Replaces the file.
void write_trace_file(const std::filesystem::path& path, const std::vector<watch::Trace>& traces,
                      const TraceClocks& clocks);

}  // namespace muster::detail::observe
