// The random generators of a rank.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::train {

/// Seeds torch's generators with f(seed, rank), anew after so many reports; alike on every rank, with the seed that was
/// given there, once enable_reproducibility() has been called.
void seed_generators(std::uint64_t seed, int rank, std::int64_t reports = 0);

/// Their state as bytes, the CPU's first, then that of `device` if it is a GPU; and back. As long on every rank.
std::string generator_state(at::Device device);
void set_generator_state(const std::string& state, at::Device device);

/// The random state of each of the micro-batches that a rank takes of a step, and the rank's own for everything else.
class MicroBatchGenerators {
 public:
  /// Micro-batch m begins with f(seed, m); the generators stay as they are.
  MicroBatchGenerators(std::uint64_t seed, int first, int count, at::Device device);

  /// From now on torch draws from that micro-batch's (of this rank's, from 0), or from the rank's own (-1).
  void change_to(int micro_batch);

  /// All micro-batches' states, one after the other; and back, from a string of that length.
  std::string state();
  void restore(const std::string& state);
  std::size_t state_size() const;

 private:
  std::string& current() { return inside_ < 0 ? own_ : micro_batches_[static_cast<std::size_t>(inside_)]; }

  at::Device device_;
  std::string own_;
  std::vector<std::string> micro_batches_;
  int inside_ = -1;
};

}  // namespace muster::detail::train
