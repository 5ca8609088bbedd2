#include "data/sources/hdf5_column.hpp"

#include "data/sources/chunked_column.hpp"
#include "data/sources/contiguous_column.hpp"
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
  if (!array.chunk.empty()) measure_chunks(array.chunk);
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
    auto library = std::make_unique<LibraryColumn>(std::move(array.dataset), std::move(array.memory_type),
                                                   std::move(array.shape), stored_row_bytes_, shown_);
    library_ = library.get();
    reader_ = std::move(library);
  }
}

void Hdf5Column::measure_chunks(const std::vector<std::int64_t>& chunk) {
  const auto chunks_along = [](std::int64_t size, std::int64_t of_chunk) {
    return std::ceil(static_cast<double>(size) / static_cast<double>(of_chunk));
  };
  blocks_.rows = std::min(chunk.front(), rows_);
  blocks_.count = chunks_along(rows_, chunk.front());
  blocks_.bytes = static_cast<double>(chunk.front()) * static_cast<double>(conversion_.stored_bytes());
  // HDF5 numbers chunks by the bits of their coordinates and keeps one chunk for each number modulo the slots.
  const auto numbers = [](double chunks) { return std::exp2(std::ceil(std::log2(chunks))); };
  auto slots = numbers(blocks_.count);
  for (std::size_t i = 1; i < chunk.size(); ++i) {
    const auto chunks = chunks_along(column_.shape[i - 1], chunk[i]);
    blocks_.bytes *= chunks * static_cast<double>(chunk[i]);
    slots *= numbers(chunks);
  }
  constexpr double fewest = 521, most = 1 << 20;
  blocks_.slots = static_cast<std::size_t>(std::clamp(slots, fewest, most));
}

double Hdf5Column::all_bytes() const noexcept {
  if (blocks_.rows > 0) return blocks_.count * blocks_.bytes;
  return static_cast<double>(rows_) * static_cast<double>(stored_row_bytes_);
}

void Hdf5Column::expect(const File& bytes, std::span<const std::int64_t> rows) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file ahead");
  reader_->expect(bytes, rows);
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
                  "row " + std::to_string(row) + " holds a number above 2^63 − 1, too large for a tensor",
                  "Convert it, or choose other columns");
}

}  // namespace muster::detail::data
