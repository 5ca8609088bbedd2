#include "data/sources/contiguous_column.hpp"

#include "data/sources/scattered_read.hpp"

namespace muster::detail::data {

void ContiguousColumn::read(const File& bytes, std::span<const RowDestination> wanted) {
  ScatteredRead pieces(bytes, shown_);
  for (const auto& [row, into] : wanted)
    pieces.add(offset_ + static_cast<std::uint64_t>(row) * row_bytes_, into, row_bytes_);
  pieces.finish();
}

}  // namespace muster::detail::data
