#include "checkpoint/files/write_plan.hpp"

#include "checkpoint/files/pieces.hpp"

#include <algorithm>
#include <map>

namespace muster::detail::checkpoint {
namespace {

/// Returns the ranks that may write: the first writer of each node, then the second of each node, and so on. A node's
/// writers are evenly spread over its ranks.
std::vector<int> candidates_of(const std::map<int, std::vector<int>>& nodes, int max_writers_per_node) {
  std::vector<int> candidates;
  for (int i = 0; i < max_writers_per_node; ++i)
    for (const auto& [node, ranks] : nodes)
      if (const auto writers = std::min(ranks.size(), static_cast<std::size_t>(max_writers_per_node));
          static_cast<std::size_t>(i) < writers)
        candidates.push_back(ranks[static_cast<std::size_t>(i) * ranks.size() / writers]);
  return candidates;
}

}  // namespace

std::vector<int> plan_writers(std::uint64_t file_bytes, const std::vector<int>& owners,
                              const std::vector<int>& node_of_rank, const WriteLimits& limits) {
  // Rank 0's node is the first, so rank 0 is always among the writers.
  std::map<int, std::vector<int>> nodes;
  const auto node_of = [&](int rank) {
    const int node = node_of_rank[static_cast<std::size_t>(rank)];
    return node == node_of_rank.front() ? -1 : node;
  };
  for (int rank = 0; rank < static_cast<int>(node_of_rank.size()); ++rank) nodes[node_of(rank)].push_back(rank);
  auto writers = candidates_of(nodes, limits.max_writers_per_node);
  writers.resize(std::clamp<std::uint64_t>(file_bytes / limits.min_share_bytes, 1, writers.size()));
  std::ranges::sort(writers);
  std::map<int, std::vector<int>> writers_on;
  for (const int writer : writers) writers_on[node_of(writer)].push_back(writer);

  std::vector<int> plan(owners.size(), -1);
  std::vector<std::size_t> shared;
  for (std::size_t piece = 0; piece < owners.size(); ++piece) {
    const int owner = owners[piece];
    const auto on_node = owner < 0 ? writers_on.end() : writers_on.find(node_of(owner));
    if (on_node == writers_on.end()) {
      shared.push_back(piece);
      continue;
    }
    // Choose the nearest writer at or below the owner, or the first if none is below. So an owner that is a writer gets
    // its own pieces.
    const auto above = std::ranges::upper_bound(on_node->second, owner);
    plan[piece] = above == on_node->second.begin() ? *above : *std::prev(above);
  }
  const auto count = static_cast<int>(writers.size());
  for (int i = 0; i < count; ++i) {
    const auto mine = share_of(shared.size(), {i, count});
    for (auto at = mine.begin; at < mine.end; ++at) plan[shared[at]] = writers[static_cast<std::size_t>(i)];
  }
  return plan;
}

}  // namespace muster::detail::checkpoint
