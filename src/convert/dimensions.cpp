#include "convert/dimensions.hpp"

#include "base/log.hpp"
#include "hdf5/file.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>

namespace muster::detail::convert {
namespace {

/// An element of the attribute REFERENCE_LIST: a dimension that a scale is attached to.
struct Reference {
  hobj_ref_t dataset = 0;
  std::int32_t dimension = 0;
  std::int32_t unused = 0;  ///< in place of padding, whose bytes would be random
};

/// Writes the scales of a new file.
class Scales {
 public:
  Scales(hid_t file, const std::string& writing) : file_(file), writing_(writing) {}

  /// Registers a copied column, which may be the scale of other columns.
  void add(ColumnDimensions& column) {
    const bool is_field = hdf5::Scale{column.path}.name() != column.name;
    if (!is_field) names_[column.path] = column.name;
    make_coordinate(column);
  }

  /// Numbers the dimensions of a column that is a scale, as NetCDF does. If it has several dimensions and one of them
  /// has no name or number in the new file, the column becomes an ordinary one, since NetCDF opens no file with such a
  /// scale.
  void number(ColumnDimensions& column) {
    const hdf5::Handle dataset(check(H5Dopen2(file_, column.name.c_str(), H5P_DEFAULT)), H5Dclose);
    const auto shape = hdf5::shape(dataset.get());
    const auto own = column.scales.front().number;
    if (shape.size() == 1) {
      if (own) write(dataset.get(), "_Netcdf4Dimid", H5T_NATIVE_INT32, {}, &*own);
      return;
    }
    bool is_whole = names_.contains(column.path);
    std::vector<std::int32_t> numbers(shape.size());
    for (std::size_t d = 0; d < shape.size() && is_whole; ++d) {
      is_whole = column.scales[d].number && !name_of(column.scales[d], shape[d]).empty();
      numbers[d] = column.scales[d].number.value_or(0);
    }
    if (is_whole) {
      write(dataset.get(), "_Netcdf4Dimid", H5T_NATIVE_INT32, {}, numbers.data());
      write(dataset.get(), "_Netcdf4Coordinates", H5T_NATIVE_INT32, {std::ssize(numbers)}, numbers.data());
      return;
    }
    for (const auto* name : {"CLASS", "NAME"})
      if (check(H5Aexists(dataset.get(), name)) > 0) check(H5Adelete(dataset.get(), name));
    names_.erase(column.path);
    column.path.clear();
  }

  void attach_to(const ColumnDimensions& column) {
    const hdf5::Handle dataset(check(H5Dopen2(file_, column.name.c_str(), H5P_DEFAULT)), H5Dclose);
    const auto shape = hdf5::shape(dataset.get());
    const auto rank = shape.size();
    std::vector<std::string> names(rank);
    bool loses_names = column.loses_names;
    for (std::size_t d = 0; d < rank; ++d) {
      names[d] = name_of(column.scales[d], shape[d]);
      loses_names = loses_names || (names[d].empty() && !column.scales[d].path.empty());
    }
    // NetCDF opens no file with a variable whose first dimension has a scale while another has none.
    if (loses_names) names.front().clear();
    std::vector<hobj_ref_t> scales(rank);
    std::vector<hvl_t> list(rank);
    for (std::size_t d = 0; d < rank; ++d) {
      const auto& name = names[d];
      if (name.empty()) continue;
      scales[d] = reference_to(name);
      list[d] = {1, &scales[d]};
      references_[name].push_back({reference_to(column.name), static_cast<std::int32_t>(d)});
    }
    const hdf5::Handle type(check(H5Tvlen_create(H5T_STD_REF_OBJ)), H5Tclose);
    const auto has_any = [](const hvl_t& one) { return one.len > 0; };
    if (std::ranges::any_of(list, has_any))
      write(dataset.get(), "DIMENSION_LIST", type.get(), {static_cast<std::int64_t>(rank)}, list.data());
  }

  void write_references() const {
    const hdf5::Handle type(check(H5Tcreate(H5T_COMPOUND, sizeof(Reference))), H5Tclose);
    check(H5Tinsert(type.get(), "dataset", offsetof(Reference, dataset), H5T_STD_REF_OBJ));
    check(H5Tinsert(type.get(), "dimension", offsetof(Reference, dimension), H5T_NATIVE_INT32));
    for (const auto& [name, references] : references_) {
      const hdf5::Handle scale(check(H5Dopen2(file_, name.c_str(), H5P_DEFAULT)), H5Dclose);
      write(scale.get(), "REFERENCE_LIST", type.get(), {std::ssize(references)}, references.data());
    }
  }

 private:
  std::int64_t check(std::int64_t status) const { return hdf5::check(status, writing_, ExitCode::retry); }

  void write(hid_t dataset, const char* name, hid_t type, const std::vector<std::int64_t>& shape,
             const void* values) const {
    const auto space = hdf5::make_space(shape, writing_, ExitCode::retry);
    const hdf5::Handle made(check(H5Acreate2(dataset, name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT)), H5Aclose);
    check(H5Awrite(made.get(), type, values));
  }
  void write_text(hid_t dataset, const char* name, const std::string& text) const {
    const hdf5::Handle type(check(H5Tcopy(H5T_C_S1)), H5Tclose);
    check(H5Tset_size(type.get(), text.size() + 1));
    write(dataset, name, type.get(), {}, text.c_str());
  }

  /// If a column has the name of its first dimension, makes it the scale of that dimension. In its own file the column
  /// was no scale, since the dimension belongs to another group. The copy has a single group, in which NetCDF takes a
  /// variable with the name of a dimension for the coordinate.
  void make_coordinate(ColumnDimensions& column) {
    if (column.is_scale() || column.scales.empty() || column.scales.front().name() != column.name) return;
    const hdf5::Handle dataset(check(H5Dopen2(file_, column.name.c_str(), H5P_DEFAULT)), H5Dclose);
    for (const auto* attribute : {"CLASS", "NAME"})
      if (check(H5Aexists(dataset.get(), attribute)) > 0) return;  // the attribute means something else here
    write_text(dataset.get(), "CLASS", "DIMENSION_SCALE");
    write_text(dataset.get(), "NAME", column.name);
    column.path = column.scales.front().path;
    names_[column.path] = column.name;
  }

  hobj_ref_t reference_to(const std::string& name) const {
    hobj_ref_t reference = 0;
    check(H5Rcreate(&reference, file_, name.c_str(), H5R_OBJECT, -1));
    return reference;
  }

  /// Returns the name of the scale in the new file, and makes the scale if it is missing. Empty if the name is taken,
  /// or if the scale that is there has another size.
  std::string name_of(const hdf5::Scale& scale, std::int64_t size) {
    if (scale.path.empty()) return {};
    auto& name = names_[scale.path];
    if (name.empty()) {
      name = scale.name();
      if (check(H5Lexists(file_, name.c_str(), H5P_DEFAULT)) > 0) {
        if (nameless_.insert(scale.path).second)
          log::warn(writing_ + ": the dimension " + scale.path +
                    " has no name in the copy, where a column or another dimension is called " + name +
                    ". To keep the name, leave that one out with --columns");
        return name = {};
      }
      make(scale, size);
    }
    const hdf5::Handle made(check(H5Dopen2(file_, name.c_str(), H5P_DEFAULT)), H5Dclose);
    return hdf5::shape(made.get()).front() == size ? name : std::string();
  }

  /// Makes the scale of a dimension that has no variable.
  void make(const hdf5::Scale& scale, std::int64_t size) const {
    const auto creation = hdf5::make_properties(H5P_DATASET_CREATE, writing_, ExitCode::retry);
    check(H5Pset_obj_track_times(creation.get(), false));
    const auto space = hdf5::make_space({size}, writing_, ExitCode::retry);
    const hdf5::Handle dataset(check(H5Dcreate2(file_, scale.name().c_str(), H5T_IEEE_F32BE, space.get(), H5P_DEFAULT,
                                                creation.get(), H5P_DEFAULT)),
                               H5Dclose);
    write_text(dataset.get(), "CLASS", "DIMENSION_SCALE");
    write_text(dataset.get(), "NAME", hdf5::only_dimension + formatted(".%10lld", static_cast<long long>(size)));
    if (scale.number) write(dataset.get(), "_Netcdf4Dimid", H5T_NATIVE_INT32, {}, &*scale.number);
  }

  hid_t file_;
  const std::string& writing_;
  std::map<std::string, std::string> names_;                  ///< of scales in the new file, by paths in the old one
  std::map<std::string, std::vector<Reference>> references_;  ///< by the names in the new file
  std::set<std::string> nameless_;                            ///< the paths of dimensions that a warning has named
};

}  // namespace

ColumnDimensions dimensions_of(hid_t dataset, const std::string& name, const std::string& shown) {
  const hdf5::Lock lock;
  return {.name = name,
          .path = hdf5::path_of(dataset),
          .scales = hdf5::scales_of(dataset, hdf5::shape(dataset, shown).size(), shown)};
}

void forget_ambiguous(std::vector<ColumnDimensions>& columns) {
  std::set<std::string> of_samples, of_others;
  for (const auto& column : columns)
    for (const auto& scale : column.scales)
      (&scale == &column.scales.front() ? of_samples : of_others).insert(scale.path);
  const auto is_ambiguous = [&](const std::string& path) {
    return !path.empty() && of_samples.contains(path) && of_others.contains(path);
  };
  for (auto& column : columns)
    for (std::size_t d = column.is_scale() ? 1 : 0; d < column.scales.size(); ++d) {
      if (!is_ambiguous(column.scales[d].path)) continue;
      column.scales[d] = {};
      column.loses_names = true;
    }
}

void name_dimensions(hid_t file, std::vector<ColumnDimensions> columns, const std::string& writing) {
  const hdf5::Lock lock;
  Scales scales(file, writing);
  for (auto& column : columns) scales.add(column);
  for (auto& column : columns)
    if (column.is_scale()) scales.number(column);
  for (const auto& column : columns)
    if (!column.is_scale()) scales.attach_to(column);
  scales.write_references();
}

}  // namespace muster::detail::convert
