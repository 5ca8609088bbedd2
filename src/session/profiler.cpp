#include "session/profiler.hpp"

#include "base/log.hpp"
#include "comm/collectives.hpp"
#include "comm/outcome.hpp"
#include "observe/trace_file.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

constexpr std::size_t most_events = std::size_t{1} << 16;  ///< events that a rank keeps; the oldest are dropped
constexpr std::int64_t default_first = 11, default_count = 10;
constexpr int tag = 1;

/// Waits for the request. If the wait throws, the request keeps the memory, since MPI may still use it.
void finish_request(comm::Request request, std::shared_ptr<void> memory) {
  request.keep(std::move(memory));
  request.wait();
}

/// Returns the texts of all ranks on rank 0, which receives one after the other; returns nothing on the other ranks.
/// Collective.
std::vector<std::string> gather(const Communicator& ranks, std::string text) {
  using comm::Dtype;
  comm::Collectives collectives(ranks);
  std::vector<std::string> all;
  const auto own = std::make_shared<std::string>(std::move(text));
  if (ranks.rank() != 0) {
    const auto bytes = std::make_shared<std::int64_t>(static_cast<std::int64_t>(own->size()));
    finish_request(collectives.send(bytes.get(), 1, Dtype::i64, 0, tag), bytes);
    finish_request(collectives.send(own->data(), own->size(), Dtype::u8, 0, tag), own);
    return all;
  }
  all.push_back(std::move(*own));
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto bytes = std::make_shared<std::int64_t>();
    finish_request(collectives.receive(bytes.get(), 1, Dtype::i64, rank, tag), bytes);
    const auto received = std::make_shared<std::string>(static_cast<std::size_t>(*bytes), '\0');
    finish_request(collectives.receive(received->data(), received->size(), Dtype::u8, rank, tag), received);
    all.push_back(std::move(*received));
  }
  return all;
}

}  // namespace

Profiler::Profiler(const ProfileConfig& config, std::filesystem::path run, const WorkerContext& workers)
    : config_(config),
      run_(std::move(run)),
      workers_(workers.control),
      clocks_at_begin_(comm::measure_clock_offsets(workers_)) {}

Profiler::~Profiler() {
  if (stage_ == Stage::recording || stage_ == Stage::after) watch::take_trace();
}

void Profiler::begin_step(std::int64_t step) {
  if (stage_ == Stage::after || stage_ == Stage::written) return;
  if (last_ == 0) {
    first_ = config_.last_step == 0 ? step - 1 + default_first : config_.first_step;
    last_ = config_.last_step == 0 ? first_ - 1 + default_count : config_.last_step;
  }
  if (stage_ == Stage::recording)
    watch::record_until_now({.name = "step", .begin_ns = step_begin_ns_, .number = step_});
  if (step > last_ && stage_ == Stage::recording) stop();
  if (step > last_) stage_ = Stage::after;
  step_ = step;
  if (step < first_ || step > last_) return;
  if (stage_ == Stage::before) {
    watch::start_trace(most_events);
    phases_.emplace(config_.operators);
    stage_ = Stage::recording;
  }
  step_begin_ns_ = watch::trace_begin();
  phases_->begin_step();
}

void Profiler::stop() {
  watch::stop_trace();
  phases_.reset();
  stage_ = Stage::after;
}

void Profiler::write_if_over() {
  if (stage_ == Stage::written) return;
  if (workers_.all_reduce(std::int64_t{stage_ == Stage::after}, ReduceOp::max) != 0) write();
}

void Profiler::finish() {
  if (stage_ != Stage::written) write();
}

void Profiler::write() {
  if (stage_ == Stage::recording) stop();
  stage_ = Stage::written;
  const auto clocks = comm::measure_clock_offsets(workers_);
  const auto texts = gather(workers_, observe::pack_trace(watch::take_trace()));
  if (workers_.rank() != 0) return;
  try {
    std::vector<watch::Trace> traces;
    for (const auto& text : texts) traces.push_back(observe::unpack_trace(text));
    if (std::ranges::all_of(traces, [](const auto& trace) { return trace.events.empty(); })) {
      log::warn(str("the profile has no trace: training ",
                    last_ == 0
                        ? std::string("has counted no step")
                        : str("has come to step ", step_, ", and the steps to record are ", first_, " to ", last_)));
      return;
    }
    const auto path = run_ / str("trace_", first_, "_", last_, ".json");
    observe::write_trace_file(path, traces, {workers_.topology(), clocks_at_begin_, clocks});
    log::info(str("the trace of the steps ", first_, " to ", last_, " is in ", path, "; ui.perfetto.dev shows it"));
  } catch (...) {
    log::warn("writing the trace: " + comm::current_outcome().text);
  }
}

}  // namespace muster::detail::session
