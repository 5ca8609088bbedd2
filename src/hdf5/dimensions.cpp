#include "hdf5/dimensions.hpp"

#include "hdf5/attributes.hpp"

namespace muster::detail::hdf5 {
namespace {

/// The last part of an object's path in its file; empty if it has none.
std::string name_of(hid_t object) {
  const auto length = H5Iget_name(object, nullptr, 0);
  if (length <= 0) {
    last_error();
    return {};
  }
  std::string name(static_cast<std::size_t>(length), '\0');
  H5Iget_name(object, name.data(), name.size() + 1);
  return name.substr(name.rfind('/') + 1);
}

std::string name_of_scale(hid_t dataset, const hvl_t& scales) {
  if (scales.len == 0 || scales.p == nullptr) return {};
  const Handle scale(H5Rdereference2(dataset, H5P_DEFAULT, H5R_OBJECT, scales.p), H5Oclose);
  if (!scale) {
    last_error();
    return {};
  }
  return name_of(scale.get());
}

}  // namespace

std::vector<std::string> dimension_names(hid_t dataset, std::size_t rank, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the dimensions of " + shown;
  std::vector<std::string> names(rank);
  if (check(H5Aexists(dataset, "DIMENSION_LIST"), doing) == 0) {
    // A variable with the name of its only dimension is the scale itself.
    if (rank == 1 && text_of_attribute(dataset, "CLASS", doing) == "DIMENSION_SCALE") names.front() = name_of(dataset);
    return names;
  }
  const Handle list(check(H5Aopen(dataset, "DIMENSION_LIST", H5P_DEFAULT), doing), H5Aclose);
  const Handle type(check(H5Tvlen_create(H5T_STD_REF_OBJ), doing), H5Tclose);
  const Handle space(check(H5Aget_space(list.get()), doing), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != static_cast<hssize_t>(rank)) return names;
  std::vector<hvl_t> scales(rank);
  if (H5Aread(list.get(), type.get(), scales.data()) < 0) {
    last_error();
    return names;
  }
  for (std::size_t d = 0; d < rank; ++d) names[d] = name_of_scale(dataset, scales[d]);
  H5Dvlen_reclaim(type.get(), space.get(), H5P_DEFAULT, scales.data());
  return names;
}

bool is_only_dimension(hid_t dataset, const std::string& shown) {
  const Lock lock;
  const std::string doing = "reading the attributes of " + shown;
  return text_of_attribute(dataset, "CLASS", doing) == "DIMENSION_SCALE" &&
         text_of_attribute(dataset, "NAME", doing).starts_with("This is a netCDF dimension but not a netCDF variable");
}

}  // namespace muster::detail::hdf5
