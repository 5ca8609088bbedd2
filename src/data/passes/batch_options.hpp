// Checks of BatchOptions. Errors have ExitCode::usage.
#pragma once

#include "data/passes/alias_table.hpp"
#include "muster/dataset.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace muster::detail::data {

class Source;

/// Throws an Error for options that no pass can follow.
void check_options(const BatchOptions& options, const std::string& doing);
/// The alias table of BatchOptions::weights; null if the weights are not defined. Throws an Error if they are not
/// `count` finite numbers ≥ 0 on the CPU, or all 0.
std::shared_ptr<const AliasTable> table_of(const at::Tensor& weights, std::int64_t count, const std::string& doing);
/// Throws an Error if all samples of `source` have the same length, so that buckets of like length make no sense.
void require_lengths(Source& source, const std::string& doing);

}  // namespace muster::detail::data
