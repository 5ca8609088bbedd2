#include "session/random.hpp"

#include "base/hash.hpp"
#include "muster/reproducibility.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

namespace muster::detail::session {
namespace {

std::vector<at::Generator> generators(at::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

/// Seeds torch's generators; each stream of a seed gives other numbers.
void seed_stream(std::uint64_t seed, int stream) {
  at::manual_seed(scrambled(scrambled(seed) + static_cast<std::uint64_t>(stream)));
}

/// The seed given to enable_reproducibility(); none if it was not called.
std::optional<std::uint64_t> seed_of_all;

}  // namespace

void seed_generators(std::uint64_t seed, int rank, std::int64_t reports) {
  const auto later = static_cast<std::uint64_t>(reports);
  if (!seed_of_all)
    seed_stream(seed + later, rank);
  else
    at::manual_seed(reports == 0 ? *seed_of_all : scrambled(*seed_of_all + later));
}

std::string generator_state(at::Device device) {
  std::string bytes;
  for (auto& generator : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const auto state = generator.get_state();
    bytes.append(static_cast<const char*>(state.const_data_ptr()), static_cast<std::size_t>(state.numel()));
  }
  return bytes;
}

MicroBatchGenerators::MicroBatchGenerators(std::uint64_t seed, const step::MicroBatchShare& share, at::Device device)
    : share_(share), device_(device), rank_state_(generator_state(device)) {
  for (int s = 0; s < share.count; ++s) {
    seed_stream(scrambled(seed), share.first + s);
    micro_batch_states_.push_back(generator_state(device));
  }
  set_generator_state(rank_state_, device);
}

void MicroBatchGenerators::switch_to(int micro_batch) {
  if (micro_batch == current_) return;
  current() = generator_state(device_);
  current_ = micro_batch;
  set_generator_state(current(), device_);
}

std::string MicroBatchGenerators::state() {
  current() = generator_state(device_);
  std::string all;
  for (const auto& state : micro_batch_states_) all += state;
  return all += rank_state_;
}

void MicroBatchGenerators::restore(const std::string& states, int saved_ranks, int rank, int ranks) {
  switch_to(-1);
  const auto size = rank_state_.size();
  if (states.size() != static_cast<std::size_t>(share_.total + saved_ranks) * size) return;
  const int of_rank = share_.total / saved_ranks;  // micro-batches of each rank that has saved
  const auto state_at = [&](int index) { return states.substr(static_cast<std::size_t>(index) * size, size); };
  for (int i = 0; i < share_.count; ++i) {
    const int micro_batch = share_.first + i, rank_states_before = micro_batch / of_rank;
    micro_batch_states_[static_cast<std::size_t>(i)] = state_at(micro_batch + rank_states_before);
  }
  if (saved_ranks != ranks) return;
  rank_state_ = state_at((rank + 1) * (of_rank + 1) - 1);
  set_generator_state(rank_state_, device_);
}

void set_generator_state(const std::string& state, at::Device device) {
  std::size_t from = 0;
  for (auto& generator : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const auto size = static_cast<std::size_t>(generator.get_state().numel());
    if (from + size > state.size()) return;  // the state was saved without this device
    auto bytes = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), state.data() + from, size);
    generator.set_state(bytes);
    from += size;
  }
}

}  // namespace muster::detail::session

namespace muster {

void enable_reproducibility(std::uint64_t seed) {
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  auto& torch = at::globalContext();
  torch.setDeterministicAlgorithms(true, /*warn_only=*/false);
  torch.setDeterministicCuDNN(true);
  torch.setBenchmarkCuDNN(false);
  at::manual_seed(seed);
  detail::session::seed_of_all = seed;
  std::srand(static_cast<unsigned>(seed));
}

}  // namespace muster
