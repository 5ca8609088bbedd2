#include "rounds.hpp"

#include "base/text.hpp"

#include <algorithm>
#include <cstring>

namespace muster::bench {

bool RoundTimer::has_next() {
  const auto now = Clock::now();
  const bool in_time = begun_ == 0 || !rounds_.end || now + (now - last_) <= *rounds_.end;
  if (begun_ >= rounds_.most || !in_time) return false;
  last_ = now;
  ++begun_;
  return true;
}

std::string RoundTimer::text() const {
  auto text = detail::str("round ", begun_, rounds_.end ? " of at most " : " of ", rounds_.most);
  std::optional<Clock::duration> left;
  if (begun_ > 1) left = (last_ - start_) / (begun_ - 1) * (rounds_.most - begun_ + 1);
  if (rounds_.end) left = std::min(left.value_or(Clock::duration::max()), *rounds_.end - last_);
  if (!left) return text;
  const auto seconds = std::chrono::ceil<std::chrono::seconds>(*left).count();
  return detail::str(text, rounds_.end ? ", at most " : ", about ", std::max<std::int64_t>(1, seconds), " s left");
}

bool has_next_round(RoundTimer& timer, const Communicator& communicator) {
  const std::int64_t mine = communicator.rank() == 0 ? timer.has_next() : 0;
  return communicator.all_reduce(mine, ReduceOp::max) != 0;
}

double timed(const Communicator& communicator, const std::function<void()>& work) {
  communicator.barrier();
  const auto begin = Clock::now();
  work();
  const std::chrono::duration<double, std::milli> taken = Clock::now() - begin;
  return communicator.all_reduce(taken.count(), ReduceOp::max);
}

Timings measure(const Communicator& communicator, const std::vector<Candidate>& candidates,
                const Measurement& measurement) {
  Timings timings;
  for (const auto& candidate : candidates) timings.candidates.push_back(candidate.name);
  timings.ms.resize(candidates.size());
  RoundTimer timer(measurement.rounds);
  for (int round = 0; has_next_round(timer, communicator); ++round) {
    measurement.show(timer.text());
    for (const auto index : rotation(round, candidates.size())) {
      const auto& candidate = candidates[index];
      candidate.before();
      timings.ms[index].push_back(timed(communicator, candidate.run) / candidate.operations);
      candidate.after();
    }
    measurement.keep(timings);
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
