#include "rounds.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace muster::bench {
namespace {

/// Fewer rounds do not give a meaningful interval.
constexpr int least_rounds = 5;

}  // namespace

double RoundTimer::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

bool RoundTimer::has_next() {
  const bool in_time = !rounds_.budget || seconds() < static_cast<double>(rounds_.budget->count());
  if (begun_ >= rounds_.most || (begun_ >= least_rounds && !in_time)) return false;
  ++begun_;
  return true;
}

std::string RoundTimer::text() const {
  auto text =
      "round " + std::to_string(begun_) + (rounds_.budget ? " of at most " : " of ") + std::to_string(rounds_.most);
  if (begun_ < 2) return text;
  const double taken = seconds(), of_a_round = taken / (begun_ - 1);
  double all = of_a_round * rounds_.most;
  if (rounds_.budget) all = std::clamp(static_cast<double>(rounds_.budget->count()), of_a_round * least_rounds, all);
  return text + ", about " + std::to_string(std::lround(std::max(1.0, all - taken))) + " s left";
}

bool has_next_round(RoundTimer& timer, const Communicator& communicator) {
  const std::int64_t mine = communicator.rank() == 0 ? timer.has_next() : 0;
  return communicator.all_reduce(mine, ReduceOp::max) != 0;
}

double timed(const Communicator& communicator, const std::function<void()>& work) {
  communicator.barrier();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
  return communicator.all_reduce(taken.count(), ReduceOp::max);
}

Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates, const Rounds& rounds,
                const Progress& progress) {
  Timings timings;
  for (const auto& candidate : candidates) timings.candidates.push_back(candidate.name);
  timings.ms.resize(candidates.size());
  RoundTimer timer(rounds);
  for (int round = 0; has_next_round(timer, communicator); ++round) {
    progress(timer.text());
    for (const auto index : rotation(round, candidates.size())) {
      const auto& candidate = candidates[index];
      candidate.before();
      timings.ms[index].push_back(timed(communicator, candidate.run) / candidate.operations);
      candidate.after();
    }
  }
  return timings;
}

bool same_on_all_ranks(const Communicator& communicator, std::span<const std::byte> bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < bytes.size(); i += sizeof hash) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min(sizeof word, bytes.size() - i));
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  const auto mine = static_cast<std::int64_t>(hash);
  return communicator.all_reduce(mine, ReduceOp::min) == communicator.all_reduce(mine, ReduceOp::max);
}

}  // namespace muster::bench
