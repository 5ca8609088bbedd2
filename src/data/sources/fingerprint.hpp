// A fingerprint of a dataset, to check that two ranks have the same samples. It compares counts, columns, orders,
// lengths and the checksums of a few blocks. It does not compare times, inodes and paths: a copy on a node's own disk
// is as good as the file itself.
#pragma once

#include "base/file.hpp"
#include "muster/json.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::data {

/// A file, or a tensor in memory.
struct FingerprintPart {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t checksum = 0;  ///< CRC-32 of some blocks at fixed places
};

struct DatasetFingerprint {
  std::int64_t count = 0;
  std::string schema;      ///< "x Float[3], y Long[]"
  std::string order = {};  ///< "in 64 lanes of chunks of 27 samples"; empty if a shuffle depends on the count alone
  std::vector<FingerprintPart> parts = {};

  Json to_json() const;
  static DatasetFingerprint from_json(const Json& json);
};

/// Blocks read for a fingerprint, over all parts; at least two per part.
constexpr int max_fingerprint_blocks = 48;

/// The CRC-32 of `bytes`, continued from `before`.
std::uint32_t checksum_of(std::span<const std::byte> bytes, std::uint32_t before = 0);
/// Make the fingerprint of one part from about `blocks` of its blocks.
FingerprintPart fingerprint_of(const File& file, int blocks);
FingerprintPart fingerprint_of(const std::string& column, const at::Tensor& tensor, int blocks);

/// Describes the first difference; none if there is none. `here` and `there` name the places of a and b:
/// "it has 26 samples on rank 0 and 30 on rank 1".
std::optional<std::string> difference(const DatasetFingerprint& a, const std::string& here, const DatasetFingerprint& b,
                                      const std::string& there);

}  // namespace muster::detail::data
