// The random generators of a rank.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::train {

/// Seeds torch's generators with f(seed, rank).
void seed_generators(std::uint64_t seed, int rank);

/// Their state as bytes, the CPU's first, then that of `device` if it is a GPU; and back. As long on every rank.
std::string generator_state(at::Device device);
void set_generator_state(const std::string& state, at::Device device);

/// The random state of each of the shards that a rank takes, and the rank's own for all that is no shard's.
class ShardGenerators {
 public:
  /// Shard s begins with f(seed, s); the generators stay as they are.
  ShardGenerators(std::uint64_t seed, int first, int count, at::Device device);

  /// From now on torch draws from that shard's (from 0).
  void enter(int shard);
  /// From now on torch draws from the rank's own.
  void leave();

  /// All shards' states, one after the other; and back, from a string of that length.
  std::string state();
  void restore(const std::string& state);
  std::size_t state_size() const;

 private:
  std::string& current() { return inside_ < 0 ? own_ : shards_[static_cast<std::size_t>(inside_)]; }
  void change_to(int shard);

  at::Device device_;
  std::string own_;
  std::vector<std::string> shards_;
  int inside_ = -1;
};

}  // namespace muster::detail::train
