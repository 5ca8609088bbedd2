#include "convert/dataset_writer.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "convert/attributes.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"

#include <unistd.h>

namespace muster::detail::convert {

DatasetWriter::DatasetWriter(std::filesystem::path output, bool aligned)
    : output_(std::move(output)), temporary_(temporary_beside(output_)) {
  remove_unfinished(output_, /*none_writes=*/false);
  try {
    file_ = hdf5::create_file(temporary_, aligned ? 4096 : 1);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

DatasetWriter::~DatasetWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void DatasetWriter::begin_column(const std::string& name, hid_t stored, const std::vector<std::int64_t>& shape,
                                 std::optional<std::int64_t> chunk, std::optional<int> compress) {
  const hdf5::Lock lock;
  const auto creation = hdf5::make_properties(H5P_DATASET_CREATE, doing(), ExitCode::retry);
  const hid_t id = creation.get();
  check(H5Pset_fill_time(id, H5D_FILL_TIME_NEVER));
  check(H5Pset_obj_track_times(id, false));  // equal input gives equal bytes
  // Also for chunked columns: with late allocation HDF5 1.10 loses the place of a single chunk that exceeds its cache.
  if (!compress) check(H5Pset_alloc_time(id, H5D_ALLOC_TIME_EARLY));
  if (chunk) {
    std::vector<hsize_t> sizes(shape.begin(), shape.end());
    sizes.front() = static_cast<hsize_t>(*chunk);
    check(H5Pset_chunk(id, static_cast<int>(sizes.size()), sizes.data()));
  }
  if (compress) hdf5::compress(id, stored, static_cast<int>(*compress), doing());
  // Without a chunk cache H5Dwrite writes each chunk at once, and so its status shows if that has failed.
  const auto access = hdf5::make_properties(H5P_DATASET_ACCESS, doing(), ExitCode::retry);
  check(H5Pset_chunk_cache(access.get(), 0, 0, 1));
  const auto space = hdf5::make_space(shape, doing(), ExitCode::retry);
  column_ = {check(H5Dcreate2(file_.get(), name.c_str(), stored, space.get(), H5P_DEFAULT, id, access.get())),
             H5Dclose};
  next_ = 0;
}

void DatasetWriter::copy_attributes(hid_t from, const std::string& shown) {
  const hdf5::Lock lock;
  for (const auto& name : attribute_names(from, shown)) {
    // These are about the dimensions of the old file; name_dimensions() writes them for the new one.
    if (name == "_Netcdf4Coordinates" || name == "_Netcdf4Dimid" || name == "DIMENSION_LIST" ||
        name == "REFERENCE_LIST" || name == hdf5::array_dimensions)
      continue;
    const Attribute attribute(from, name, shown);
    if (attribute.is_simple())
      attribute.write_to(column_.get(), doing());
    else
      log::warn(doing() + ": the attribute " + name + " of " + shown +
                " is not copied; it holds neither numbers nor strings, or more than 1 MB or 1024 strings");
  }
}

void DatasetWriter::write(std::span<const std::byte> values, std::int64_t count, hid_t value_type) {
  const hdf5::Lock lock;
  auto shape = hdf5::shape(column_.get());
  shape.front() = count;
  const auto memory = hdf5::make_space(shape, doing(), ExitCode::retry);
  const auto rows = hdf5::dataset_property(column_.get(), H5Dget_space, doing(), ExitCode::retry);
  hdf5::select_rows(rows.get(), H5S_SELECT_SET, next_, count, doing(), ExitCode::retry);
  check(H5Dwrite(column_.get(), value_type, memory.get(), rows.get(), H5P_DEFAULT, values.data()));
  next_ += count;
}

void DatasetWriter::end_column() {
  const hdf5::Lock lock;
  check(H5Fflush(file_.get(), H5F_SCOPE_LOCAL));
  column_.close(doing());
}

void DatasetWriter::name_dimensions(const std::vector<ColumnDimensions>& columns) {
  convert::name_dimensions(file_.get(), columns, doing());
}

void DatasetWriter::finish() {
  file_.close(doing());
  File written(temporary_, File::Mode::write);
  written.sync();
  written.close();
}

void DatasetWriter::put_in_place() {
  replace_file(output_, temporary_);
  temporary_.clear();
}

}  // namespace muster::detail::convert
