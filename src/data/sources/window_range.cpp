#include "data/sources/window_range.hpp"

#include "base/text.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"

#include <algorithm>

namespace muster::detail::data {
namespace {

/// The path of the coordinate `name`, in the group of the variable at `place` or one around it; empty if there is none.
std::string find_coordinate(const hdf5::GroupPath& place, const std::string& name, const OpenFiles& files) {
  const hdf5::Lock lock;
  const auto file = std::ranges::find(files, place.path, &OpenFile::path)->handle.get();
  for (auto group = place.group; !group.empty();) {
    group.resize(group.rfind('/'));
    const auto opened = hdf5::open_group(file, group + "/", place.path);
    if (std::ranges::binary_search(hdf5::list(opened.get()), name)) return place.path + ":" + group + "/" + name;
  }
  return {};
}

}  // namespace

DimensionPart part_of_dimension(const std::string& path, const std::vector<std::string>& names,
                                const decltype(WindowOptions::range)::value_type& range, OpenFiles& files) {
  const auto& [name, limits] = range;
  const auto refuse = [&](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::data, "choosing a part of " + path + " by \"" + name + "\"", fact, remedy);
  };
  const auto dimension = std::ranges::find(names, name);
  if (name.empty() || dimension == names.end())
    refuse("it has no dimension of that name", "WindowOptions::range names dimensions; `muster inspect` shows them");
  const auto coordinate_path = find_coordinate(hdf5::GroupPath(path), name, files);
  if (coordinate_path.empty())
    refuse("there is no coordinate of that name", "Choose a part by index, with Dataset::subset");
  ChunkDecoding decoding(/*cache_bytes=*/0);
  const WindowVariable coordinate(coordinate_path, files, decoding, nullptr);
  if (coordinate.array().shape.size() != 1)
    refuse(str("the coordinate has ", coordinate.array().shape.size(), " dimensions"),
           "Choose a part by index, with Dataset::subset");
  const WindowShape whole({.size = {0}}, coordinate.array().shape, coordinate.dimension_names(), "reading " + path);
  const std::vector<std::int64_t> only{0};
  TensorPool pool;
  const auto values = coordinate.read(WindowCoordinates(&only, 1), whole, pool).to(at::kDouble);
  const auto* const begin = values.const_data_ptr<double>();
  const auto* const end = begin + values.numel();
  const auto is_inside = [&](double value) { return value >= limits.first && value <= limits.second; };
  const auto* const first = std::find_if(begin, end, is_inside);
  const auto* const last = std::find_if_not(first, end, is_inside);
  if (first == end) refuse("none of its values lies there", "Give limits in the units of the stored values");
  if (std::any_of(last, end, is_inside))
    refuse("its values do not ascend or descend: the part has gaps", "Choose a part by index, with Dataset::subset");
  return {static_cast<std::size_t>(dimension - names.begin()), first - begin, last - begin};
}

}  // namespace muster::detail::data
