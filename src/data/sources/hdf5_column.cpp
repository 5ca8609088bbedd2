#include "data/sources/hdf5_column.hpp"

#include "base/text.hpp"
#include "data/sources/chunked_column.hpp"
#include "data/sources/contiguous_column.hpp"
#include "data/sources/library_column.hpp"
#include "muster/error.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

namespace muster::detail::data {

Hdf5Column::Hdf5Column(std::string name, StoredArray array)
    : column_{std::move(name), array.conversion.dtype(), {array.shape.begin() + 1, array.shape.end()}},
      shown_(array.shown),
      conversion_(std::move(array.conversion)),
      rows_(array.shape.front()) {
  std::int64_t values = 1;
  for (const auto size : column_.shape) values *= size;
  row_bytes_ = values * static_cast<std::int64_t>(c10::elementSize(column_.dtype));
  stored_row_bytes_ = values * static_cast<std::int64_t>(conversion_.stored_bytes());
  if (!array.chunk.empty()) measure_chunks(array);
  if (array.offset) {
    reader_ = std::make_unique<ContiguousColumn>(*array.offset, stored_row_bytes_, shown_);
    needs_hdf5_ = needs_memory_ = false;
  } else if (array.chunks) {
    ChunkLayout layout(std::move(array.shape), std::move(array.chunk),
                       static_cast<std::int64_t>(conversion_.stored_bytes()));
    auto reader = std::make_unique<ChunkedColumn>(std::move(array.chunks), std::move(layout));
    needs_memory_ = !reader->reads_rows_alone();
    reader_ = std::move(reader);
  } else {
    auto library = std::make_unique<LibraryColumn>(array.library(), array.shape, stored_row_bytes_, shown_);
    library_ = &library->array();
    reader_ = std::move(library);
  }
}

void Hdf5Column::measure_chunks(const StoredArray& array) {
  const auto chunks_along = [&](std::size_t d) {
    return std::ceil(static_cast<double>(array.shape[d]) / static_cast<double>(array.chunk[d]));
  };
  blocks_.rows = std::min(array.chunk.front(), rows_);
  blocks_.count = chunks_along(0);
  blocks_.bytes = static_cast<double>(array.chunk.front()) * static_cast<double>(array.record_bytes);
  for (std::size_t d = 1; d < array.chunk.size(); ++d)
    blocks_.bytes *= chunks_along(d) * static_cast<double>(array.chunk[d]);
  blocks_.slots = array.chunk_slots();
}

double Hdf5Column::all_bytes() const noexcept {
  if (library_ == nullptr && blocks_.rows > 0) return blocks_.count * blocks_.bytes;
  return static_cast<double>(rows_) * static_cast<double>(stored_row_bytes_);
}

void Hdf5Column::expect(const File& bytes, std::span<const RowRange> rows, Ahead how) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file ahead");
  reader_->expect(bytes, rows, how);
}

void Hdf5Column::read(const File& bytes, std::span<const RowDestination> wanted) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file");
  if (conversion_.is_copy()) return reader_->read(bytes, wanted);
  // Stored values go to the end of their row, from where they are converted in place.
  std::vector<RowDestination> stored(wanted.begin(), wanted.end());
  for (auto& row : stored) row.into += row_bytes_ - stored_row_bytes_;
  reader_->read(bytes, stored);
  const auto values = static_cast<std::size_t>(stored_row_bytes_) / conversion_.stored_bytes();
  for (const auto& [row, into] : wanted)
    if (conversion_(into, values) < values)
      throw Error(ExitCode::data, "reading " + shown_,
                  str("row ", row, " holds a number above 2^63 − 1, too large for a tensor"),
                  "Convert it, or choose other columns");
}

}  // namespace muster::detail::data
