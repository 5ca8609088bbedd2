#include "data/sources/ragged_file.hpp"

#include "base/text.hpp"
#include "data/sources/ragged_offsets.hpp"
#include "data/sources/scattered_read.hpp"
#include "muster/error.hpp"
#include "zarr/open_file.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <iterator>

namespace muster::detail::data {
namespace {

/// True if a tensor of this type can hold `number`.
bool holds(at::ScalarType type, const at::Scalar& number) {
  const bool has_fractions = at::isFloatingType(type) || at::isComplexType(type);
  if (number.isComplex() ? !at::isComplexType(type) : !has_fractions && !number.isIntegral(/*includeBool=*/true))
    return false;
  try {
    const auto filled = at::empty({}, type).fill_(number).item();
    return has_fractions || filled.toLong() == number.toLong();
  } catch (const std::exception&) {  // the number overflows the type
    return false;
  }
}

}  // namespace

void RaggedFile::open(const RaggedOptions& options, ChunkDecoding& decoding) {
  handle = zarr::open_file(path);
  bytes.emplace(open_for_pieces(zarr::main_file(path)));
  const auto in = hdf5::open_group(handle.get(), group, path);
  const auto open_column = [&](const std::string& name, ChunkDecoding& by) {
    return Hdf5Column(name, open_array(in.get(), *bytes, name, shown(name), by));
  };
  for (const auto& name : options.values) values.push_back(open_column(name, decoding));
  for (const auto& column : values) check_values(column, options.padding);
  {
    ChunkDecoding of_offsets(options.cache_bytes);  // ends with the column, by whose reader's address it keeps chunks
    auto column = open_column(options.offsets, of_offsets);
    offsets = read_offsets(column, *bytes, values.front().rows(), shown(options.offsets));
    std::ranges::copy(of_offsets.foreign, std::back_inserter(decoding.foreign));
  }
  for (const auto& name : options.columns) columns.push_back(open_column(name, decoding));
  for (const auto& column : columns) check_rows(column);
  if (std::ranges::none_of(values, &Hdf5Column::needs_hdf5) && std::ranges::none_of(columns, &Hdf5Column::needs_hdf5))
    handle = {};
}

void RaggedFile::check_values(const Hdf5Column& column, const at::Scalar& padding) const {
  const auto doing = "opening " + shown(column.column().name);
  if (column.rows() != values.front().rows())
    throw Error(ExitCode::data, doing,
                str("it has ", column.rows(), " values, and \"", values.front().column().name, "\" has ",
                    values.front().rows()),
                "Name columns of values with the same offsets");
  if (!holds(column.column().dtype, padding))
    throw Error(ExitCode::usage, doing,
                str("its type, ", c10::toString(column.column().dtype), ", cannot hold RaggedOptions::padding"),
                "Give a number of that type");
}

void RaggedFile::check_rows(const Hdf5Column& column) const {
  if (column.rows() != samples())
    throw Error(ExitCode::data, "opening " + shown(column.column().name),
                str("it has ", column.rows(), " rows, and the offsets are those of ", samples(), " samples"),
                "Name columns with a row for each sample");
}

}  // namespace muster::detail::data
