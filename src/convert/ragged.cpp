#include "convert/ragged.hpp"

#include "data/sources/source.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"

#include <ATen/TensorOperators.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>

namespace muster::detail::convert {
namespace {

/// At most so many offsets are checked here; Dataset::ragged checks all of them.
constexpr std::int64_t most_checked = 1 << 20;

at::Tensor read_rows(const Dataset& dataset, const std::string& name, std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), first);
  return dataset.read(rows)[name].to(at::kLong);
}

/// The last value of the column if it is made of whole numbers that ascend from 0; otherwise −1.
std::int64_t end_of_offsets(const std::string& path, const StoredColumn& column, std::vector<std::string>& advice) {
  const auto rows = column.shape.front();
  if (column.shape.size() != 1 || rows < 2) return -1;
  const auto dataset = Dataset::from_hdf5({path}, {.columns = {column.name}});
  try {
    if (!at::isIntegralType(dataset.schema().front().dtype, /*includeBool=*/false)) return -1;
  } catch (const Error&) {  // the column's description says why it cannot be opened
    return -1;
  }
  try {
    const auto checked = read_rows(dataset, column.name, 0, std::min(rows, most_checked));
    const auto end = read_rows(dataset, column.name, rows - 1, 1).item<std::int64_t>();
    const auto* const first = checked.const_data_ptr<std::int64_t>();
    const auto* const last = first + checked.numel();
    return *first == 0 && std::is_sorted(first, last) && *(last - 1) <= end ? end : -1;
  } catch (const Error& error) {
    advice.emplace_back(error.what());
    return -1;
  }
}

std::vector<std::string> names_with_rows(const std::vector<StoredColumn>& columns, std::int64_t rows,
                                         const std::string& except) {
  std::vector<std::string> names;
  for (const auto& column : columns)
    if (column.shape.front() == rows && column.name != except && column.file_bytes > 0) names.push_back(column.name);
  return names;
}

std::string in_braces(const Json& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "\"" : ", \"") + name.get<std::string>() + "\"";
  return "{" + text + "}";
}

}  // namespace

Json find_ragged(const std::string& path, const std::vector<StoredColumn>& columns, std::vector<std::string>& advice) {
  for (const auto& offsets : columns) {
    const auto values = end_of_offsets(path, offsets, advice);
    const auto samples = offsets.shape.front() - 1;
    if (values < 1 || values == samples) continue;
    const auto of_values = names_with_rows(columns, values, offsets.name);
    if (of_values.empty()) continue;
    return {{"values", of_values},
            {"offsets", offsets.name},
            {"columns", names_with_rows(columns, samples, offsets.name)},
            {"samples", samples}};
  }
  return nullptr;
}

std::string ragged_call(const std::string& path, const Json& ragged) {
  const RaggedOptions defaults;
  auto options = ".values = " + in_braces(ragged.at("values"));
  if (ragged.at("offsets") != defaults.offsets)
    options += ", .offsets = \"" + ragged.at("offsets").get<std::string>() + "\"";
  if (!ragged.at("columns").empty()) options += ", .columns = " + in_braces(ragged.at("columns"));
  return "Dataset::ragged(\"" + path + "\", {" + options + "})";
}

}  // namespace muster::detail::convert
