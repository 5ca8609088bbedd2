#include "data/sources/ragged_offsets.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <span>

namespace muster::detail::data {
namespace {

/// The rows `first` … `first` + `count` − 1 as int64.
at::Tensor read_rows(Hdf5Column& column, const File& bytes, std::int64_t first, std::int64_t count) {
  const auto rows = at::empty({count}, column.column().dtype);
  auto* const begin = static_cast<std::byte*>(rows.mutable_data_ptr());
  std::vector<RowDestination> wanted;
  wanted.reserve(static_cast<std::size_t>(count));
  for (std::int64_t row = 0; row < count; ++row) wanted.push_back({first + row, begin + row * column.row_bytes()});
  column.read(bytes, wanted);
  return rows.to(at::kLong);
}

}  // namespace

std::vector<std::int64_t> read_offsets(Hdf5Column& column, const File& bytes, std::int64_t values,
                                       const std::string& shown) {
  const auto refuse = [&](const std::string& fact, const char* remedy = "Make the file again") {
    throw Error(ExitCode::data, "reading the offsets " + shown, fact, remedy);
  };
  if (!column.column().shape.empty() || !at::isIntegralType(column.column().dtype, /*includeBool=*/false))
    refuse("they are not one whole number for each sample", "Name another column in RaggedOptions::offsets");
  if (column.rows() < 2) refuse("there are fewer than two, and so no samples", "Name a file that has some");
  // The last one first: most files that are damaged are found out before all offsets are read.
  const auto last = read_rows(column, bytes, column.rows() - 1, 1).item<std::int64_t>();
  if (last != values) refuse(str("the last one is ", last, ", and there are ", values, " values"));
  std::vector<std::int64_t> offsets;
  try {
    offsets.reserve(static_cast<std::size_t>(column.rows()));
  } catch (const std::exception&) {
    refuse(str("there are ", column.rows(), ", more than fit into memory"));
  }
  constexpr std::int64_t block = 1 << 16;
  for (std::int64_t first = 0; first < column.rows(); first += block) {
    const auto rows = read_rows(column, bytes, first, std::min(block, column.rows() - first));
    for (const auto offset : std::span(rows.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(rows.numel()))) {
      const auto before = offsets.empty() ? 0 : offsets.back();
      if (offsets.empty() && offset != 0) refuse(str("the first one is ", offset, ", not 0"));
      if (offset < before || offset > values)
        refuse(str("number ", offsets.size(), " is ", offset, ", which is not between ", before,
                   ", the one before, and ", values, ", the number of values"));
      offsets.push_back(offset);
    }
  }
  return offsets;
}

}  // namespace muster::detail::data
