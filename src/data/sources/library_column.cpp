#include "data/sources/library_column.hpp"

#include "hdf5/file.hpp"

#include <cstring>
#include <utility>

namespace muster::detail::data {

LibraryColumn::LibraryColumn(hdf5::Handle dataset, hdf5::Handle memory_type, std::vector<std::int64_t> shape,
                             std::int64_t row_bytes, std::string shown)
    : dataset_(std::move(dataset)),
      memory_type_(std::move(memory_type)),
      shape_(std::move(shape)),
      row_bytes_(row_bytes),
      shown_(std::move(shown)) {}

void LibraryColumn::keep_chunks(hid_t file, std::size_t slots, std::size_t bytes) {
  const std::string doing = "reading " + shown_;
  const hdf5::Lock lock;
  const hdf5::Handle access(hdf5::check(H5Pcreate(H5P_DATASET_ACCESS), doing), H5Pclose);
  // w0 = 1: a chunk that was read to its end goes first, since this pass does not need it again.
  hdf5::check(H5Pset_chunk_cache(access.get(), slots, bytes, /*w0=*/1.0), doing);
  const auto length = hdf5::check(H5Iget_name(dataset_.get(), nullptr, 0), doing);
  std::string name(static_cast<std::size_t>(length), '\0');
  hdf5::check(H5Iget_name(dataset_.get(), name.data(), name.size() + 1), doing);
  dataset_ = {};  // while it is open its cache stays as it is
  dataset_ = hdf5::Handle(hdf5::check(H5Dopen2(file, name.c_str(), access.get()), doing), H5Dclose);
}

void LibraryColumn::read(const File&, std::span<const RowDestination> wanted) {
  if (!is_kept_) return read_selected(wanted);
  read_whole();
  for (const auto& [row, into] : wanted)
    std::memcpy(into, whole_.data() + row * row_bytes_, static_cast<std::size_t>(row_bytes_));
}

void LibraryColumn::read_whole() {
  const hdf5::Lock lock;
  if (!whole_.empty()) return;
  std::vector<std::byte> values(static_cast<std::size_t>(shape_.front() * row_bytes_));
  hdf5::check(H5Dread(dataset_.get(), memory_type_.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
              "reading " + shown_);
  whole_ = std::move(values);
  dataset_ = {};
}

void LibraryColumn::read_selected(std::span<const RowDestination> wanted) const {
  const std::string doing = "reading " + shown_;
  constexpr std::size_t most_runs = 256;  // a selection of many more runs costs HDF5 more than it saves
  const hdf5::Lock lock;
  auto shape = shape_;
  for (std::size_t begin = 0; begin < wanted.size();) {
    const auto file_space = hdf5::dataset_property(dataset_.get(), H5Dget_space, doing);
    std::size_t end = begin, runs = 0;
    std::int64_t rows = 0, last = -1;
    for (; end < wanted.size() && runs < most_runs; ++runs) {
      // A row that is wanted several times is read once.
      const std::int64_t first = wanted[end].row;
      for (last = first; end < wanted.size() && wanted[end].row <= last + 1; ++end) last = wanted[end].row;
      hdf5::select_rows(file_space.get(), runs == 0 ? H5S_SELECT_SET : H5S_SELECT_OR, first, last - first + 1, doing);
      rows += last - first + 1;
    }
    shape.front() = rows;
    const auto memory_space = hdf5::make_space(shape, doing);
    std::vector<std::byte> values(static_cast<std::size_t>(rows * row_bytes_));
    hdf5::check(
        H5Dread(dataset_.get(), memory_type_.get(), memory_space.get(), file_space.get(), H5P_DEFAULT, values.data()),
        doing);
    std::int64_t slot = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (i > begin && wanted[i].row != wanted[i - 1].row) ++slot;
      std::memcpy(wanted[i].into, values.data() + slot * row_bytes_, static_cast<std::size_t>(row_bytes_));
    }
    begin = end;
  }
}

}  // namespace muster::detail::data
