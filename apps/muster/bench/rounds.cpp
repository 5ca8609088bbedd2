#include "rounds.hpp"

#include <chrono>
#include <cstring>

namespace muster::bench {

double timed(const Communicator& communicator, const std::function<void()>& work) {
  communicator.barrier();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - begin;
  return communicator.all_reduce(taken.count(), ReduceOp::max);
}

Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates, int rounds,
                const std::function<void(int round)>& progress) {
  Timings timings;
  for (const auto& candidate : candidates) timings.candidates.push_back(candidate.name);
  timings.ms.resize(candidates.size());
  for (int round = 0; round < rounds; ++round) {
    progress(round);
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
