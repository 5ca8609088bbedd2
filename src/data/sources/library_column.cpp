#include "data/sources/library_column.hpp"

#include "hdf5/file.hpp"

#include <cstring>

namespace muster::detail::data {

void LibraryColumn::read(const File&, std::span<const RowDestination> wanted) {
  const std::byte* whole = nullptr;
  {
    const hdf5::Lock lock;
    whole = array_.whole();
    if (whole == nullptr) return read_selected(wanted);
  }
  for (const auto& [row, into] : wanted)
    std::memcpy(into, whole + row * row_bytes_, static_cast<std::size_t>(row_bytes_));
}

void LibraryColumn::read_selected(std::span<const RowDestination> wanted) const {
  const std::string doing = "reading " + shown_;
  constexpr std::size_t most_runs = 256;  // a selection of many more runs costs HDF5 more than it saves
  auto shape = shape_;
  for (std::size_t begin = 0; begin < wanted.size();) {
    const auto file_space = array_.space();
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
    std::vector<std::byte> values(static_cast<std::size_t>(rows * row_bytes_));
    array_.read(file_space.get(), shape, values.data());
    std::int64_t slot = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (i > begin && wanted[i].row != wanted[i - 1].row) ++slot;
      std::memcpy(wanted[i].into, values.data() + slot * row_bytes_, static_cast<std::size_t>(row_bytes_));
    }
    begin = end;
  }
}

}  // namespace muster::detail::data
