#include "convert/attributes.hpp"

#include "hdf5/types.hpp"

#include <cstddef>

namespace muster::detail::convert {
namespace {

constexpr std::size_t most_bytes = 1 << 20;
constexpr std::size_t most_strings = 1024;  ///< of variable length: a hostile file may repeat a long one

}  // namespace

std::vector<std::string> attribute_names(hid_t dataset, const std::string& shown) {
  std::vector<std::string> names;
  const auto add = [](hid_t, const char* name, const H5A_info_t*, void* out) -> herr_t {
    static_cast<std::vector<std::string>*>(out)->emplace_back(name);
    return 0;
  };
  hdf5::check(H5Aiterate2(dataset, H5_INDEX_NAME, H5_ITER_INC, nullptr, add, &names),
              "listing the attributes of " + shown);
  return names;
}

Attribute::Attribute(hid_t dataset, const std::string& name, const std::string& shown)
    : name_(name), doing_("reading the attribute " + name + " of " + shown) {
  attribute_ = {hdf5::check(H5Aopen(dataset, name.c_str(), H5P_DEFAULT), doing_), H5Aclose};
  const hdf5::Handle stored(hdf5::check(H5Aget_type(attribute_.get()), doing_), H5Tclose);
  // A _FillValue must have the type of its column, and columns of enumerations become integers. Booleans, which h5py
  // stores as an enumeration, stay booleans.
  const bool is_enumeration =
      H5Tget_class(stored.get()) == H5T_ENUM && H5Tequal(stored.get(), hdf5::memory_type_of(at::kBool).get()) <= 0;
  // A copy, since a type with a name belongs to its file.
  type_ = {hdf5::check(is_enumeration ? H5Tget_super(stored.get()) : H5Tcopy(stored.get()), doing_), H5Tclose};
  space_ = {hdf5::check(H5Aget_space(attribute_.get()), doing_), H5Sclose};
  const auto count = static_cast<std::size_t>(hdf5::check(H5Sget_simple_extent_npoints(space_.get()), doing_));
  const auto size = H5Tget_size(type_.get());
  has_pointers_ = H5Tis_variable_str(type_.get()) > 0;
  const auto kind = H5Tget_class(type_.get());
  const bool is_number = kind == H5T_INTEGER || kind == H5T_FLOAT || kind == H5T_ENUM;
  is_simple_ =
      (is_number || kind == H5T_STRING) && size > 0 && count <= (has_pointers_ ? most_strings : most_bytes / size);
  if (is_simple_) bytes_ = count * size;
}

void Attribute::write_to(hid_t dataset, const std::string& writing) const {
  std::vector<std::byte> values(bytes_);
  const auto write = [&](std::int64_t status) { return hdf5::check(status, writing, ExitCode::retry); };
  const hdf5::Handle copy(
      write(H5Acreate2(dataset, name_.c_str(), type_.get(), space_.get(), H5P_DEFAULT, H5P_DEFAULT)), H5Aclose);
  if (bytes_ == 0) return;
  hdf5::check(H5Aread(attribute_.get(), type_.get(), values.data()), doing_);
  const auto status = H5Awrite(copy.get(), type_.get(), values.data());
  if (has_pointers_) H5Dvlen_reclaim(type_.get(), space_.get(), H5P_DEFAULT, values.data());
  write(status);
}

}  // namespace muster::detail::convert
