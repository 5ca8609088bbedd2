#include "data/sources/library_array.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace muster::detail::data {

LibraryArray::LibraryArray(hdf5::Handle dataset, hdf5::Handle memory_type, std::vector<std::int64_t> shape,
                           std::size_t value_bytes, std::string shown)
    : dataset_(std::move(dataset)),
      memory_type_(std::move(memory_type)),
      shape_(std::move(shape)),
      value_bytes_(value_bytes),
      shown_(std::move(shown)) {}

void LibraryArray::keep_in_memory() noexcept { is_kept_ = std::ranges::find(shape_, 0) == shape_.end(); }

void LibraryArray::close() {
  const std::string doing = "reading " + shown_;
  const auto length = hdf5::check(H5Iget_name(dataset_.get(), nullptr, 0), doing);
  name_.resize(static_cast<std::size_t>(length));
  hdf5::check(H5Iget_name(dataset_.get(), name_.data(), name_.size() + 1), doing);
  dataset_ = {};
}

void LibraryArray::keep_chunks(hid_t file, std::size_t slots, std::size_t bytes) {
  if (dataset_) close();
  const std::string doing = "reading " + shown_;
  const hdf5::Handle access(hdf5::check(H5Pcreate(H5P_DATASET_ACCESS), doing), H5Pclose);
  // w0 = 1: a chunk that was read to its end goes first, since this pass does not need it again.
  hdf5::check(H5Pset_chunk_cache(access.get(), slots, bytes, /*w0=*/1.0), doing);
  dataset_ = hdf5::Handle(hdf5::check(H5Dopen2(file, name_.c_str(), access.get()), doing), H5Dclose);
}

const std::byte* LibraryArray::whole() {
  if (!is_kept_) return nullptr;
  if (whole_.empty()) {
    const auto count = std::accumulate(shape_.begin(), shape_.end(), std::size_t{1}, [](auto product, auto size) {
      return product * static_cast<std::size_t>(size);
    });
    std::vector<std::byte> values(count * value_bytes_);
    hdf5::check(H5Dread(dataset_.get(), memory_type_.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
                "reading " + shown_);
    whole_ = std::move(values);
    dataset_ = {};
  }
  return whole_.data();
}

hdf5::Handle LibraryArray::space() const {
  return hdf5::dataset_property(dataset_.get(), H5Dget_space, "reading " + shown_);
}

void LibraryArray::read(hid_t space, const std::vector<std::int64_t>& shape, std::byte* into) const {
  const std::string doing = "reading " + shown_;
  const auto memory_space = hdf5::make_space(shape, doing);
  hdf5::check(H5Dread(dataset_.get(), memory_type_.get(), memory_space.get(), space, H5P_DEFAULT, into), doing);
}

}  // namespace muster::detail::data
