// Copies columns of an HDF5 file into another layout.
#include "base/text.hpp"
#include "convert/convert.hpp"
#include "convert/hdf5_rows.hpp"

#include <algorithm>
#include <memory>
#include <utility>

namespace muster {
namespace {

using detail::convert::Hdf5Group, detail::convert::Hdf5Rows, detail::convert::InputColumn;
namespace hdf5 = detail::hdf5;

/// The names of all columns of the group.
std::vector<std::string> columns_of(const Hdf5Group& group) {
  const hdf5::Lock lock;
  auto names = hdf5::list(group.group.get());
  std::erase_if(names,
                [&](const auto& name) { return !hdf5::is_column(group.group.get(), name, group.place.shown(name)); });
  if (names.empty())
    throw Error(ExitCode::data, "reading " + group.place.path, "group \"" + group.place.group + "\" holds no datasets",
                "Name the group as FILE.h5:/group; `muster inspect` lists what the file holds");
  return names;
}

constexpr std::int64_t plain_bytes = 1 << 20;  ///< of one read of a plain pass, at most, unless a row is larger

void read_plainly(Hdf5Rows& rows, std::int64_t samples) {
  const auto bytes = static_cast<std::int64_t>(rows.row_bytes());
  const auto step = std::max<std::int64_t>(1, plain_bytes / bytes);
  std::vector<std::byte> values(static_cast<std::size_t>(step * bytes));
  for (std::int64_t at = 0; at < samples; at += step) rows.read(at, std::min(step, samples - at), values);
}

}  // namespace

std::vector<std::filesystem::path> detail::convert::copy_columns(const std::filesystem::path& input,
                                                                 const std::filesystem::path& output,
                                                                 const ConvertOptions& options,
                                                                 std::optional<std::int64_t> samples) {
  const auto group = std::make_shared<const Hdf5Group>(input.string());
  const auto names = options.columns.empty() ? columns_of(*group) : options.columns;
  check_conversion({group->place.path}, names.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (const auto& name : names) columns.emplace_back(std::make_unique<Hdf5Rows>(group, name));
  return convert_columns(std::move(columns), names, output, options, samples);
}

std::vector<std::filesystem::path> convert_h5(const std::vector<std::filesystem::path>& inputs,
                                              const std::filesystem::path& output, const ConvertOptions& options) {
  if (inputs.size() != 1)
    throw Error(ExitCode::usage, "converting to " + output.string(),
                detail::str(inputs.size(), " inputs are given, and one HDF5 file is copied"),
                "Name one, as FILE.h5 or FILE.h5:/group");
  return detail::convert::copy_columns(inputs.front(), output, options);
}

PlainPass plain_pass(const std::string& path, const std::vector<std::string>& columns, std::int64_t samples) {
  const auto group = std::make_shared<const Hdf5Group>(path);
  std::vector<std::shared_ptr<Hdf5Rows>> opened;
  for (const auto& name : columns) opened.push_back(std::make_shared<Hdf5Rows>(group, name));
  return [=] {
    for (const auto& rows : opened) read_plainly(*rows, std::min(samples, rows->shape().front()));
  };
}

}  // namespace muster
