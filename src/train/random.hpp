// The random generators of a rank.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace muster::train {

/// Seeds torch's generators with f(seed, rank).
void seed_generators(std::uint64_t seed, int rank);

/// Their state as bytes, the CPU's first, then that of `device` if it is a GPU; and back. As long on every rank.
std::string generator_state(at::Device device);
void set_generator_state(const std::string& state, at::Device device);

}  // namespace muster::train
