#include "hdf5/dimensions.hpp"

#include "hdf5/attributes.hpp"
#include "hdf5/file.hpp"

namespace muster::detail::hdf5 {
namespace {

bool is_scale(hid_t dataset, const std::string& doing) {
  return text_of_attribute(dataset, "CLASS", doing) == "DIMENSION_SCALE";
}

/// Returns the path and the number of a scale. `object`: the scale's dataset.
Scale scale_of(hid_t object, const std::string& doing) {
  Scale scale{.path = path_of(object)};
  if (const auto number = numbers_of_attribute(object, "_Netcdf4Dimid", doing);
      number.size() == 1 && number.front() >= 0 && number.front() < 0x1p31)
    scale.number = static_cast<std::int32_t>(number.front());
  return scale;
}

/// For a dataset that is a scale with several dimensions, and so has no DIMENSION_LIST: finds the scales by NetCDF's
/// numbers of the dimensions, in the dataset's group or the groups around it.
void find_by_number(hid_t dataset, std::vector<Scale>& scales, const std::string& doing) {
  const auto numbers = numbers_of_attribute(dataset, "_Netcdf4Coordinates", doing);
  if (numbers.size() != scales.size()) return;
  for (auto group = path_of(dataset); !group.empty();) {
    group.resize(group.rfind('/'));
    const Handle opened(check(H5Gopen2(dataset, (group + "/").c_str(), H5P_DEFAULT), doing), H5Gclose);
    for (const auto& name : list(opened.get())) {
      const Handle object(H5Oopen(opened.get(), name.c_str(), H5P_DEFAULT), H5Oclose);
      if (!object) last_error();
      if (!object || H5Iget_type(object.get()) != H5I_DATASET || !is_scale(object.get(), doing)) continue;
      const auto found = scale_of(object.get(), doing);
      for (std::size_t d = 0; d < scales.size(); ++d)
        if (scales[d].path.empty() && found.number && *found.number == numbers[d]) scales[d] = found;
    }
  }
}

}  // namespace

std::string path_of(hid_t object) {
  const auto length = H5Iget_name(object, nullptr, 0);
  if (length <= 0) {
    last_error();
    return {};
  }
  std::string path(static_cast<std::size_t>(length), '\0');
  H5Iget_name(object, path.data(), path.size() + 1);
  return path;
}

std::vector<Scale> scales_of(hid_t dataset, std::size_t rank, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the dimensions of " + shown;
  std::vector<Scale> scales(rank);
  if (check(H5Aexists(dataset, "DIMENSION_LIST"), doing) == 0) {
    if (const auto names = texts_of_attribute(dataset, array_dimensions, doing); names.size() == rank && rank > 0) {
      const auto path = path_of(dataset);
      for (std::size_t d = 0; d < rank; ++d)
        if (!names[d].empty()) scales[d].path = path.substr(0, path.rfind('/') + 1) + names[d];
    }
    if (rank == 0 || !is_scale(dataset, doing)) return scales;
    // A variable with the name of its only dimension is the scale itself.
    if (rank == 1)
      scales.front() = scale_of(dataset, doing);
    else
      find_by_number(dataset, scales, doing);
    return scales;
  }
  const Handle list(check(H5Aopen(dataset, "DIMENSION_LIST", H5P_DEFAULT), doing), H5Aclose);
  const Handle type(check(H5Tvlen_create(H5T_STD_REF_OBJ), doing), H5Tclose);
  const Handle space(check(H5Aget_space(list.get()), doing), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != static_cast<hssize_t>(rank)) return scales;
  std::vector<hvl_t> references(rank);
  if (H5Aread(list.get(), type.get(), references.data()) < 0) {
    last_error();
    return scales;
  }
  for (std::size_t d = 0; d < rank; ++d) {
    if (references[d].len == 0 || references[d].p == nullptr) continue;
    const Handle scale(H5Rdereference2(dataset, H5P_DEFAULT, H5R_OBJECT, references[d].p), H5Oclose);
    if (scale)
      scales[d] = scale_of(scale.get(), doing);
    else
      last_error();
  }
  H5Dvlen_reclaim(type.get(), space.get(), H5P_DEFAULT, references.data());
  return scales;
}

std::vector<std::string> dimension_names(hid_t dataset, std::size_t rank, const std::string& shown) {
  std::vector<std::string> names;
  for (const auto& scale : scales_of(dataset, rank, shown)) names.push_back(scale.name());
  return names;
}

bool is_only_dimension(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the attributes of " + shown;
  return is_scale(dataset, doing) && text_of_attribute(dataset, "NAME", doing).starts_with(only_dimension);
}

}  // namespace muster::detail::hdf5
