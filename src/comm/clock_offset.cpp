#include "comm/clock_offset.hpp"

#include "comm/collectives.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>

namespace muster::detail::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int exchanges = 100;  ///< messages to the first rank of each other node
constexpr int tag = 0;

std::int64_t now() { return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count(); }

/// Waits for the request. The request keeps the number alive: if the wait throws, MPI may still write to it.
void finish(Request request, const std::shared_ptr<std::int64_t>& number) {
  request.keep(number);
  request.wait();
}

/// Answers all of rank 0's questions for the time.
void tell_time(Collectives& collectives) {
  for (int i = 0; i < exchanges; ++i) {
    const auto asked = std::make_shared<std::int64_t>();
    finish(collectives.receive(asked.get(), 1, Dtype::i64, 0, tag), asked);
    const auto time = std::make_shared<std::int64_t>(now());
    finish(collectives.send(time.get(), 1, Dtype::i64, 0, tag), time);
  }
}

ClockOffset ask_time(Collectives& collectives, int rank) {
  ClockOffset best{.error = std::chrono::nanoseconds::max()};
  for (int i = 0; i < exchanges; ++i) {
    const auto before = std::make_shared<std::int64_t>(now()), time = std::make_shared<std::int64_t>();
    finish(collectives.send(before.get(), 1, Dtype::i64, rank, tag), before);
    finish(collectives.receive(time.get(), 1, Dtype::i64, rank, tag), time);
    const auto after = now();
    const std::chrono::nanoseconds error((after - *before + 1) / 2);
    if (error >= best.error) continue;
    const auto middle = *before + (after - *before) / 2;
    best = {.offset = std::chrono::nanoseconds(middle - *time),
            .error = error,
            .when = Clock::time_point(std::chrono::nanoseconds(middle))};
  }
  return best;
}

}  // namespace

std::vector<ClockOffset> measure_clock_offsets(const Communicator& communicator) {
  const auto& node_of_rank = communicator.topology().node_of_rank;
  Collectives collectives(communicator);
  std::vector<ClockOffset> offsets;
  for (int node = 0; node < communicator.topology().num_nodes; ++node) {
    const auto first = static_cast<int>(std::ranges::find(node_of_rank, node) - node_of_rank.begin());
    if (communicator.rank() == 0)
      offsets.push_back(first == 0 ? ClockOffset{.when = Clock::now()} : ask_time(collectives, first));
    else if (communicator.rank() == first)
      tell_time(collectives);
  }
  return offsets;
}

}  // namespace muster::detail::comm
