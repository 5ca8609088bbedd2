#include "train/random.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <mutex>
#include <vector>

namespace muster::detail::train {
namespace {

std::vector<at::Generator> generators(at::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(at::kCPU)};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

/// One round of SplitMix64 (Steele, Lea and Flood, 2014).
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void seed_generators(std::uint64_t seed, int rank) {
  at::manual_seed(mix(mix(seed) + static_cast<std::uint64_t>(rank)));
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

ShardGenerators::ShardGenerators(std::uint64_t seed, int first, int count, at::Device device)
    : device_(device), own_(generator_state(device)) {
  for (int s = 0; s < count; ++s) {
    seed_generators(mix(seed), first + s);
    shards_.push_back(generator_state(device));
  }
  set_generator_state(own_, device);
}

void ShardGenerators::change_to(int shard) {
  if (shard == inside_) return;
  current() = generator_state(device_);
  inside_ = shard;
  set_generator_state(current(), device_);
}

void ShardGenerators::enter(int shard) { change_to(shard); }
void ShardGenerators::leave() { change_to(-1); }

std::string ShardGenerators::state() {
  current() = generator_state(device_);
  std::string all;
  for (const auto& shard : shards_) all += shard;
  return all;
}

void ShardGenerators::restore(const std::string& state) {
  leave();
  const auto size = shards_.front().size();
  for (std::size_t s = 0; s < shards_.size(); ++s) shards_[s] = state.substr(s * size, size);
}

std::size_t ShardGenerators::state_size() const { return shards_.front().size() * shards_.size(); }

void set_generator_state(const std::string& state, at::Device device) {
  std::size_t from = 0;
  for (auto& generator : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const auto size = static_cast<std::size_t>(generator.get_state().numel());
    if (from + size > state.size()) return;  // saved without this device
    auto bytes = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), state.data() + from, size);
    generator.set_state(bytes);
    from += size;
  }
}

}  // namespace muster::detail::train
