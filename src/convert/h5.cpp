// Copies columns of an HDF5 file into another layout.
#include "convert/convert.hpp"
#include "convert/hdf5_rows.hpp"

#include <memory>
#include <utility>

namespace muster {
namespace {

using detail::convert::Hdf5Group, detail::convert::Hdf5Rows, detail::convert::InputColumn;
namespace hdf5 = detail::hdf5;

/// The names of all columns of the group, which leave out groups and single values.
std::vector<std::string> columns_of(const Hdf5Group& group) {
  const hdf5::Lock lock;
  auto names = hdf5::list(group.group.get());
  std::erase_if(names, [&](const auto& name) {
    if (detail::convert::is_group(group.group.get(), name)) return true;
    const auto shown = group.place.shown(name);
    return hdf5::shape(hdf5::open_dataset(group.group.get(), name, shown).get(), shown).empty();
  });
  if (names.empty())
    throw Error(ExitCode::data, "reading " + group.place.path, "group \"" + group.place.group + "\" holds no datasets",
                "Name the group as FILE.h5:/group; `muster inspect` lists what the file holds");
  return names;
}

}  // namespace

std::vector<std::filesystem::path> convert_h5(const std::vector<std::filesystem::path>& inputs,
                                              const std::filesystem::path& output, const ConvertOptions& options) {
  if (inputs.size() != 1)
    throw Error(ExitCode::usage, "converting to " + output.string(),
                std::to_string(inputs.size()) + " inputs are given, and one HDF5 file is copied",
                "Name one, as FILE.h5 or FILE.h5:/group");
  const auto group = std::make_shared<const Hdf5Group>(inputs.front().string());
  const auto names = options.columns.empty() ? columns_of(*group) : options.columns;
  detail::convert::check_conversion({group->place.path}, names.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (const auto& name : names) columns.emplace_back(std::make_unique<Hdf5Rows>(group, name));
  return detail::convert::convert_columns(std::move(columns), names, output, options);
}

}  // namespace muster
