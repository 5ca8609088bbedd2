// A loop of preadv, with which the reading of contiguous columns is compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace muster::soak {

using Order = std::vector<std::int64_t>;

/// Where the values of the contiguous column "x" begin in the file.
std::uint64_t contiguous_offset(const std::string& path);

/// Reads samples of `sample_bytes` bytes that lie one after the other from `offset` on, a call for each of them. They
/// fill a tensor of `batch` samples; within a batch they are read in the order of the file.
void read_plainly(const std::string& path, std::uint64_t offset, const Order& order, std::size_t batch,
                  std::size_t sample_bytes);

}  // namespace muster::soak
