#include "support/chunk_reader.hpp"

#include "hdf5/chunk_index.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filter_pipeline.hpp"

#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace muster::test {
namespace {

using namespace detail::hdf5;

std::size_t product(const std::vector<std::int64_t>& sizes) {
  return static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>()));
}

/// Copies the values of one chunk to their places in the dataset, one after the other.
void place(const ChunkIndex& index, std::int64_t number, const std::vector<std::byte>& chunk,
           const std::vector<std::int64_t>& shape, std::size_t value_bytes, std::vector<std::byte>& values) {
  const auto at = chunk_coordinates(number, index.grid());
  const auto& inner = index.chunk_shape();
  for (std::size_t i = 0; i < product(inner); ++i) {
    auto rest = static_cast<std::int64_t>(i);
    std::int64_t to = 0, stride = 1;
    bool inside = true;
    for (auto d = shape.size(); d-- > 0;) {
      const auto coordinate = at[d] * inner[d] + rest % inner[d];
      rest /= inner[d];
      inside = inside && coordinate < shape[d];
      to += coordinate * stride;
      stride *= shape[d];
    }
    if (inside)
      std::memcpy(values.data() + static_cast<std::size_t>(to) * value_bytes, chunk.data() + i * value_bytes,
                  value_bytes);
  }
}

}  // namespace

std::vector<std::byte> read_chunks(hid_t file, const detail::File& bytes, const std::string& name, std::byte fill) {
  const Lock lock;
  const auto dataset = open_dataset(file, name, name);
  const auto creation = dataset_property(dataset.get(), H5Dget_create_plist, "test");
  const auto type = dataset_property(dataset.get(), H5Dget_type, "test");
  const auto value_bytes = H5Tget_size(type.get());
  const FilterPipeline pipeline(filters(creation.get(), "test"));
  const ChunkIndex index(dataset.get(), name);
  if (!pipeline.decodes() || !index.locates()) throw std::runtime_error(name + " is left to HDF5");
  const auto shape = detail::hdf5::shape(dataset.get());
  std::vector<std::byte> values(product(shape) * value_bytes);
  std::vector<std::int64_t> numbers(product(index.grid()));
  std::iota(numbers.begin(), numbers.end(), 0);
  const auto chunks = index.locate(numbers);
  FilterPipeline::Workspace workspace;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    std::vector<std::byte> decoded(product(index.chunk_shape()) * value_bytes, fill);
    if (chunks[i].is_stored) {
      std::vector<std::byte> stored(chunks[i].bytes);
      bytes.read_at(stored, chunks[i].offset);
      pipeline.decode(stored, chunks[i].filter_mask, decoded, workspace,
                      "reading " + name + ", " + index.text(numbers[i]));
    }
    place(index, numbers[i], decoded, shape, value_bytes, values);
  }
  return values;
}

}  // namespace muster::test
