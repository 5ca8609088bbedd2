// What tells whether two ranks have the same samples: counts, columns, lengths, and a look at a few blocks. Not times,
// inodes or paths: a copy on a node's own disk is as good as the file itself.
#pragma once

#include "base/file.hpp"
#include "muster/json.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::data {

/// A file, or a tensor in memory.
struct Portion {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t checksum = 0;  ///< of some blocks at fixed places
};

struct Fingerprint {
  std::int64_t count = 0;
  std::string schema;  ///< "x Float[3], y Long[]"
  std::vector<Portion> portions = {};

  Json to_json() const;
  static Fingerprint from_json(const Json& json);
};

/// Blocks that are looked at, over all portions; each has two at the least.
constexpr int blocks_of_dataset = 48;

Portion look_at(const File& file, int blocks);
Portion look_at(const std::string& column, const at::Tensor& tensor, int blocks);

/// What differs, if anything; `here` and `there` say where: "it has 26 samples on rank 0 and 30 on rank 1".
std::optional<std::string> difference(const Fingerprint& a, const std::string& here, const Fingerprint& b,
                                      const std::string& there);

}  // namespace muster::detail::data
