// What all conversions share: which samples go where, and the way from columns to files.
#pragma once

#include "data/convert/input.hpp"
#include "muster/convert.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Refuses what is wrong with the options whatever the input is, before anything is read. `columns`: how many there
/// will be.
void check_conversion(std::size_t columns, const std::filesystem::path& output, const ConvertOptions& options);

/// A stretch of the samples in their order, and the file it goes to.
struct Split {
  std::filesystem::path output;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Divides `samples` by the shares: split k ends at round(samples × the sum of shares 0 … k), so they are disjoint and
/// shares that sum to 1 leave nothing out.
std::vector<Split> divide(std::int64_t samples, const std::filesystem::path& output, const ConvertOptions& options);

/// The numbers of the samples that are kept, in the order in which they are written. Loads `last` if its values matter.
std::vector<std::int64_t> choose(InputColumn& last, const ConvertOptions& options);

/// Writes the columns under the names in the options.
std::vector<std::filesystem::path> convert_columns(std::vector<InputColumn> columns,
                                                   const std::filesystem::path& output, const ConvertOptions& options);

}  // namespace muster::detail::data
