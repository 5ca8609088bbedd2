#include "sweep/trial_queue.hpp"

#include "base/text.hpp"
#include "comm/on_ranks.hpp"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace muster::detail::sweep {
namespace {

std::string key_of(std::size_t rung) { return str("rung ", rung); }

/// Returns the scores as bytes, which are exact, even for infinity.
group::Bytes bytes_of(const Scores& scores) {
  group::Bytes bytes;
  for (const auto& [trial, score] : scores) {
    const std::pair<std::int64_t, double> entry{trial, score};
    const auto* const first = reinterpret_cast<const std::uint8_t*>(&entry);
    bytes.insert(bytes.end(), first, first + sizeof entry);
  }
  return bytes;
}

Scores scores_in(const group::Bytes& bytes) {
  Scores scores;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::pair<std::int64_t, double>)) {
    std::pair<std::int64_t, double> entry;
    std::copy_n(bytes.data() + at, sizeof entry, reinterpret_cast<std::uint8_t*>(&entry));
    scores[static_cast<int>(entry.first)] = entry.second;
  }
  return scores;
}

}  // namespace

TrialQueue::TrialQueue(const Communicator& world, const std::vector<Scores>& rungs, std::chrono::milliseconds timeout)
    : store_(world.duplicate(), timeout) {
  comm::run_on_root(world, [&] {
    for (std::size_t rung = 0; rung < rungs.size(); ++rung) store_.set(key_of(rung), bytes_of(rungs[rung]));
  });
}

std::size_t TrialQueue::next_index() { return static_cast<std::size_t>(store_.add("next", 1) - 1); }

Scores TrialQueue::add_score(std::size_t rung, int trial, double score) {
  for (auto before = store_.get(key_of(rung));;) {
    auto scores = scores_in(before);
    scores[trial] = score;
    const auto after = bytes_of(scores);
    auto now = store_.compareSet(key_of(rung), before, after);
    if (now == after) return scores;
    before = std::move(now);
  }
}

}  // namespace muster::detail::sweep
