#include "data/sources/stored_array.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/fields.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace muster::detail::data {
namespace {

/// The size of an array, in bytes as stored. Throws an Error if it overflows.
std::uint64_t size_of(const std::vector<std::int64_t>& shape, std::size_t value_bytes, const std::string& doing,
                      const char* what) {
  auto bytes = static_cast<std::int64_t>(value_bytes);
  for (const auto size : shape) bytes = checked_product(bytes, size, doing, what);
  return static_cast<std::uint64_t>(bytes);
}

/// The offset of contiguous values in the file; none if nothing was ever written.
std::optional<std::uint64_t> offset_of(hid_t dataset, std::uint64_t length, const File& bytes,
                                       const std::string& doing) {
  const auto offset = hdf5::contiguous_offset(dataset);
  if (!offset) return {};
  const auto size = bytes.size();
  if (*offset > size || length > size - *offset)
    throw Error(ExitCode::data, doing, "the file is truncated: its values end beyond the end of the file",
                "Make or copy it again");
  return offset;
}

/// Lets the ranks of a node keep the decoded chunks together. A rank that reads another file of the same path, on a
/// disk of its own, must not take part.
void share_encoded(const StoredArray& array, const File& bytes) {
  struct stat file {};
  if (array.chunks->is_plain() || ::fstat(bytes.descriptor(), &file) != 0) return;
  array.chunks->share(str(file.st_dev, ":", file.st_ino, ":", array.shown));
}

}  // namespace

std::vector<std::size_t> strides_of(const std::vector<std::int64_t>& shape, std::size_t value_bytes) {
  std::vector<std::size_t> strides(shape.size());
  auto bytes = value_bytes;
  for (auto i = shape.size(); i-- > 0; bytes *= static_cast<std::size_t>(shape[i])) strides[i] = bytes;
  return strides;
}

std::vector<std::size_t> StoredArray::strides() const { return strides_of(shape, conversion.stored_bytes()); }
std::vector<std::size_t> StoredArray::chunk_strides() const { return strides_of(chunk, conversion.stored_bytes()); }

std::size_t StoredArray::chunk_slots() const {
  // HDF5 numbers chunks by the bits of their coordinates and keeps one chunk for each number modulo the slots.
  double slots = 1;
  for (std::size_t d = 0; d < chunk.size(); ++d)
    slots *= std::exp2(std::ceil(std::log2(std::ceil(static_cast<double>(shape[d]) / static_cast<double>(chunk[d])))));
  constexpr double fewest = 521, most = 1 << 20;
  return static_cast<std::size_t>(std::clamp(slots, fewest, most));
}

LibraryArray StoredArray::library() {
  return {std::move(dataset), std::move(memory_type), shape, conversion.stored_bytes(), shown};
}

StoredArray open_array(hid_t file, const File& bytes, const std::string& name, std::string shown,
                       ChunkDecoding& decoding) {
  const hdf5::Lock lock;
  const std::string doing = "reading " + shown;
  const auto [dataset_name, field] = hdf5::parts_of(file, name);
  auto dataset = hdf5::open_dataset(file, dataset_name, shown);
  auto shape = hdf5::shape(dataset.get(), shown);
  if (shape.empty())
    throw Error(ExitCode::data, doing, "it is a single value, not a column", "Choose columns with a first dimension");
  auto type = hdf5::dataset_property(dataset.get(), H5Dget_type, doing);
  const auto record_bytes = H5Tget_size(type.get());
  if (!field.empty()) type = hdf5::type_of_field(type.get(), field, doing);
  auto dimensions = hdf5::dimension_names(dataset.get(), shape.size(), shown);
  StoredArray array{.shown = shown,
                    .shape = std::move(shape),
                    .dimensions = std::move(dimensions),
                    .conversion = {type.get(), hdf5::packing_of(dataset.get(), type.get(), shown), shown},
                    .record_bytes = record_bytes};
  const auto value_bytes = array.conversion.stored_bytes();
  // Neither a row nor all rows may overflow as values of tensors, which are at least as large as the stored ones.
  size_of({array.shape.begin() + 1, array.shape.end()}, c10::elementSize(array.conversion.dtype()), doing, "its shape");
  size_of(array.shape, c10::elementSize(array.conversion.dtype()), doing, "its shape");
  const auto length = size_of(array.shape, value_bytes, doing, "its shape");
  if (std::find(array.shape.begin() + 1, array.shape.end(), 0) != array.shape.end())
    throw Error(ExitCode::data, doing, "its samples hold no values (a dimension is 0)", "Choose other columns");

  const auto creation = hdf5::dataset_property(dataset.get(), H5Dget_create_plist, doing);
  const auto layout = H5Pget_layout(creation.get());
  const auto filters = hdf5::filters(creation.get(), doing);
  const bool reads_file = array.conversion.reads_file() && field.empty();
  if (layout == H5D_CONTIGUOUS && reads_file) {
    array.offset = offset_of(dataset.get(), length, bytes, doing);
    if (array.offset) return array;
  } else if (layout == H5D_CHUNKED && array.shape.front() > 0) {
    hdf5::FilterPipeline pipeline(filters);
    hdf5::ChunkIndex index(dataset.get(), shown);
    array.chunk = index.chunk_shape();
    if (reads_file && pipeline.decodes() && index.locates()) {
      const auto chunk_bytes = size_of(array.chunk, value_bytes, doing, "the shape of its chunks");
      auto fill_value = hdf5::fill_value(creation.get(), type.get(), doing);
      array.chunks = std::make_unique<ChunkReader>(std::move(dataset), std::move(fill_value), std::move(index),
                                                   std::move(pipeline), chunk_bytes, decoding, std::move(shown));
      share_encoded(array, bytes);
      return array;
    }
  }
  hdf5::require_filters(filters, doing);
  array.dataset = std::move(dataset);
  array.memory_type = {hdf5::check(H5Tcopy(array.conversion.native_type()), doing), H5Tclose};
  if (!field.empty()) array.memory_type = hdf5::only_field(field, array.memory_type.get(), doing);
  array.conversion.after_hdf5();
  return array;
}

}  // namespace muster::detail::data
