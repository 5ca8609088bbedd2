// HDF5 files for tests, written by HDF5 itself.
#pragma once

#include "hdf5/handle.hpp"
#include "support/folder.hpp"

#include <cstdint>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::test {

struct Layout {
  hsize_t chunk = 0;  ///< rows; contiguous if 0
  unsigned deflate = 0;
  bool compact = false;
  H5Z_filter_t filter = 0;  ///< one that the test has registered
  hsize_t inner_chunk = 0;  ///< of the second dimension; all of it if 0
};

/// 0, 1, 2, … of C++ type T.
template <class T>
std::vector<T> counting(std::size_t n) {
  std::vector<T> values(n);
  std::iota(values.begin(), values.end(), T{});
  return values;
}

/// A new file. Members throw if HDF5 fails.
class H5File {
 public:
  explicit H5File(const std::string& path, hsize_t userblock = 0) {
    const detail::hdf5::Lock lock;
    const detail::hdf5::Handle creation(detail::hdf5::check(H5Pcreate(H5P_FILE_CREATE), "fixture"), H5Pclose);
    if (userblock > 0) detail::hdf5::check(H5Pset_userblock(creation.get(), userblock), "fixture");
    file_ = {detail::hdf5::check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), H5P_DEFAULT), "fixture"),
             H5Fclose};
  }

  hid_t id() const { return file_.get(); }

  void group(const std::string& name) {
    detail::hdf5::Handle(
        detail::hdf5::check(H5Gcreate2(id(), name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), "fixture"),
        H5Gclose);
  }

  /// `stored`: type in the file; `given`: of `values`, null leaves the dataset unwritten.
  void dataset(const std::string& name, const std::vector<hsize_t>& shape, hid_t stored, hid_t given,
               const void* values, const Layout& layout = {}) {
    const detail::hdf5::Lock lock;
    const detail::hdf5::Handle space(
        detail::hdf5::check(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), "fixture"),
        H5Sclose);
    const detail::hdf5::Handle creation(detail::hdf5::check(H5Pcreate(H5P_DATASET_CREATE), "fixture"), H5Pclose);
    if (layout.compact) detail::hdf5::check(H5Pset_layout(creation.get(), H5D_COMPACT), "fixture");
    if (layout.chunk > 0) {
      auto chunk = shape;
      chunk[0] = layout.chunk;
      if (layout.inner_chunk > 0 && chunk.size() > 1) chunk[1] = layout.inner_chunk;
      detail::hdf5::check(H5Pset_chunk(creation.get(), static_cast<int>(chunk.size()), chunk.data()), "fixture");
    }
    if (layout.filter > 0) detail::hdf5::check(H5Pset_filter(creation.get(), layout.filter, 0, 0, nullptr), "fixture");
    if (layout.deflate > 0) detail::hdf5::check(H5Pset_deflate(creation.get(), layout.deflate), "fixture");
    create(name, stored, given, space.get(), creation.get(), values);
  }

  void create(const std::string& name, hid_t stored, hid_t given, hid_t space, hid_t creation, const void* values) {
    const detail::hdf5::Handle dataset(
        detail::hdf5::check(H5Dcreate2(id(), name.c_str(), stored, space, H5P_DEFAULT, creation, H5P_DEFAULT),
                            "fixture"),
        H5Dclose);
    if (values != nullptr)
      detail::hdf5::check(H5Dwrite(dataset.get(), given, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), "fixture");
  }

  /// x [rows, 3] float32 = 0, 1, 2, … and y [rows] int64 = first, first + 1, …
  void columns(hsize_t rows, std::int64_t first = 0, const Layout& layout = {}, const std::string& group = "") {
    auto x = counting<float>(3 * rows);
    for (auto& value : x) value += 3 * static_cast<float>(first);
    auto y = counting<std::int64_t>(rows);
    for (auto& value : y) value += first;
    dataset(group + "x", {rows, 3}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, x.data(), layout);
    dataset(group + "y", {rows}, H5T_STD_I64LE, H5T_NATIVE_INT64, y.data(), layout);
  }

  /// A dimension of NetCDF that has no variable, as the NetCDF library writes it.
  void only_dimension(const std::string& name, hsize_t size) {
    const detail::hdf5::Lock lock;
    dataset(name, {size}, H5T_IEEE_F32BE, 0, nullptr);
    text_attribute(name, "CLASS", "DIMENSION_SCALE");
    text_attribute(name, "NAME",
                   "This is a netCDF dimension but not a netCDF variable.         " + std::to_string(size));
  }

  void text_attribute(const std::string& dataset, const char* name, const std::string& text) {
    const detail::hdf5::Lock lock;
    const detail::hdf5::Handle type(H5Tcopy(H5T_C_S1), H5Tclose), space(H5Screate(H5S_SCALAR), H5Sclose);
    detail::hdf5::check(H5Tset_size(type.get(), text.size() + 1), "fixture");
    attribute(dataset, name, type.get(), space.get(), text.c_str());
  }

  void numbers_attribute(const std::string& dataset, const char* name, const std::vector<std::int32_t>& numbers) {
    const detail::hdf5::Lock lock;
    const hsize_t count = numbers.size();
    const detail::hdf5::Handle space(H5Screate_simple(1, &count, nullptr), H5Sclose);
    attribute(dataset, name, H5T_NATIVE_INT32, space.get(), numbers.data());
  }

  /// Makes an array of several dimensions the scale of its first one, as NetCDF does with a variable of its name.
  /// `numbers`: those of its dimensions, the attribute _Netcdf4Dimid of their scales.
  void make_scale(const std::string& array, const std::vector<std::int32_t>& numbers) {
    text_attribute(array, "CLASS", "DIMENSION_SCALE");
    text_attribute(array, "NAME", array);
    numbers_attribute(array, "_Netcdf4Dimid", {numbers.front()});
    numbers_attribute(array, "_Netcdf4Coordinates", numbers);
  }

  /// Names the dimensions of an array, as NetCDF does: attribute DIMENSION_LIST refers to an array for each dimension.
  void name_dimensions(const std::string& array, const std::vector<std::string>& names) {
    const detail::hdf5::Lock lock;
    std::vector<hobj_ref_t> scales(names.size());
    std::vector<hvl_t> list(names.size());
    for (std::size_t d = 0; d < names.size(); ++d) {
      if (H5Lexists(id(), names[d].c_str(), H5P_DEFAULT) == 0) only_dimension(names[d], size_of(array, d));
      detail::hdf5::check(H5Rcreate(&scales[d], id(), names[d].c_str(), H5R_OBJECT, -1), "fixture");
      list[d] = {1, &scales[d]};
    }
    const hsize_t rank = names.size();
    const detail::hdf5::Handle type(H5Tvlen_create(H5T_STD_REF_OBJ), H5Tclose),
        space(H5Screate_simple(1, &rank, nullptr), H5Sclose);
    attribute(array, "DIMENSION_LIST", type.get(), space.get(), list.data());
  }

 private:
  hsize_t size_of(const std::string& array, std::size_t dimension) {
    const detail::hdf5::Handle object(detail::hdf5::check(H5Dopen2(id(), array.c_str(), H5P_DEFAULT), "fixture"),
                                      H5Dclose);
    const detail::hdf5::Handle space(H5Dget_space(object.get()), H5Sclose);
    std::vector<hsize_t> sizes(static_cast<std::size_t>(H5Sget_simple_extent_ndims(space.get())));
    H5Sget_simple_extent_dims(space.get(), sizes.data(), nullptr);
    return sizes.at(dimension);
  }
  void attribute(const std::string& dataset, const char* name, hid_t type, hid_t space, const void* values) {
    const detail::hdf5::Handle object(detail::hdf5::check(H5Dopen2(id(), dataset.c_str(), H5P_DEFAULT), "fixture"),
                                      H5Dclose);
    const detail::hdf5::Handle made(
        detail::hdf5::check(H5Acreate2(object.get(), name, type, space, H5P_DEFAULT, H5P_DEFAULT), "fixture"),
        H5Aclose);
    detail::hdf5::check(H5Awrite(made.get(), type, values), "fixture");
  }

  detail::hdf5::Handle file_;
};

}  // namespace muster::test
