// Passes over a dataset as some ranks make them, one rank after the other and without MPI.
#pragma once

#include "data/passes/batches.hpp"
#include "data/passes/pass_positions.hpp"
#include "data/passes/shard.hpp"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::data::pass_world {

using Samples = std::vector<std::int64_t>;

/// Sample i is y = i, x = {2 i, 2 i + 1}.
inline Dataset numbers(std::int64_t n) {
  return Dataset::from_tensors({{"x", at::arange(2 * n, at::kInt).view({n, 2})}, {"y", at::arange(n)}});
}

struct World {
  World(std::int64_t samples, int size, bool split = true, std::uint64_t seed = 0)
      : World(numbers(samples), size, split, seed) {}
  World(const Dataset& data, int size, bool split = true, std::uint64_t seed = 0) {
    for (int rank = 0; rank < size; ++rank) {
      pass_positions.push_back(std::make_shared<PassPositions>());
      states.push_back(add("train", data, rank, size, split, seed));
    }
  }
  std::shared_ptr<ShardState> add(const std::string& name, std::int64_t samples) { return add(name, numbers(samples)); }
  std::shared_ptr<ShardState> add(const std::string& name, const Dataset& data, int rank = 0, int size = 1,
                                  bool split = true, std::uint64_t seed = 0) {
    auto state = std::make_shared<ShardState>(
        PassPositionOptions{.name = name, .share = {.total = size, .first = rank}, .split = split, .seed = seed}, data);
    pass_positions[static_cast<std::size_t>(rank)]->add(state);
    return state;
  }
  DatasetShard shard(std::size_t rank = 0) const { return DatasetShard(states[rank]); }
  const step::BatchWeight& weight(std::size_t rank = 0) const { return pass_positions[rank]->steps->batch(); }
  std::vector<std::shared_ptr<PassPositions>> pass_positions;
  std::vector<std::shared_ptr<ShardState>> states;
};

inline void append(Samples& samples, const Batch& batch) {
  for (std::int64_t i = 0; i < batch.size(); ++i) samples.push_back(batch["y"][i].item<std::int64_t>());
}

inline Samples samples_in(BatchRange range) {
  Samples samples;
  for (const auto& batch : range) append(samples, batch);
  return samples;
}

/// The real samples of all ranks, a pass of each, no more than `stop` batches; positions are compared and given.
inline Samples run(const World& world, const BatchOptions& options, std::int64_t stop = 1000,
                   Json* position = nullptr) {
  Samples samples;
  std::set<Json> positions;
  std::set<std::int64_t> steps;
  for (const auto& state : world.states) {
    auto range = DatasetShard(state).iter_batches(options);
    steps.insert(range.num_batches());
    std::int64_t taken = 0;
    for (const auto& batch : range) {
      append(samples, batch);
      if (++taken == stop) {
        EXPECT_TRUE(state->unfinished());
        positions.insert(state->position());
        break;
      }
    }
    if (taken < stop) positions.insert(state->position());
  }
  EXPECT_EQ(steps.size(), 1u) << "all ranks run the same number of steps";
  EXPECT_EQ(positions.size(), 1u) << "all ranks stand at the same place";
  if (position != nullptr) *position = *positions.begin();
  return samples;
}

/// The samples in the order of the pass: those of all ranks, step by step, of the first `stop` steps.
inline Samples in_order(const World& world, const BatchOptions& options, std::int64_t stop = 1000,
                        Json* position = nullptr) {
  std::vector<Samples> steps;
  for (const auto& state : world.states) {
    std::size_t step = 0;
    for (const auto& batch : DatasetShard(state).iter_batches(options)) {
      if (steps.size() == step) steps.emplace_back();
      append(steps[step++], batch);
      if (static_cast<std::int64_t>(step) < stop) continue;
      if (position != nullptr) *position = state->position();
      break;
    }
  }
  Samples samples;
  for (const auto& step : steps) samples.insert(samples.end(), step.begin(), step.end());
  return samples;
}

inline Samples sorted(Samples samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

inline Samples indices(std::int64_t n) {
  Samples samples(static_cast<std::size_t>(n));
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

}  // namespace muster::detail::data::pass_world
