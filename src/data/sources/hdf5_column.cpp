#include "data/sources/hdf5_column.hpp"

#include "base/number.hpp"
#include "data/sources/contiguous_column.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"
#include "hdf5/types.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace muster::detail::data {

Hdf5Column::Hdf5Column(hid_t file, const File& bytes, const std::string& name, std::string shown,
                       ChunkDecoding& decoding)
    : column_{name, at::kFloat, {}}, shown_(std::move(shown)) {
  const hdf5::Lock lock;
  const std::string doing = "reading " + shown_;
  auto dataset = hdf5::open_dataset(file, name, shown_);
  auto& shape = column_.shape;
  shape = hdf5::shape(dataset.get(), shown_);
  if (shape.empty())
    throw Error(ExitCode::data, doing, "it is a single value, not a column", "Choose columns with a first dimension");
  rows_ = shape.front();
  shape.erase(shape.begin());

  const auto stored = hdf5::dataset_property(dataset.get(), H5Dget_type, doing);
  conversion_.emplace(stored.get(), hdf5::packing_of(dataset.get(), shown_), shown_);
  column_.dtype = conversion_->dtype();
  const auto value_bytes = static_cast<std::int64_t>(c10::elementSize(column_.dtype));
  row_bytes_ = value_bytes;
  for (const auto size : shape) row_bytes_ = checked_product(row_bytes_, size, doing, "its shape");
  static_cast<void>(checked_product(row_bytes_, rows_, doing, "its shape"));
  if (row_bytes_ == 0)
    throw Error(ExitCode::data, doing, "its samples hold no values (a dimension is 0)", "Choose other columns");
  stored_row_bytes_ = row_bytes_ / value_bytes * static_cast<std::int64_t>(conversion_->stored_bytes());

  choose_reader(std::move(dataset), bytes, decoding);
}

void Hdf5Column::choose_reader(hdf5::Handle dataset, const File& bytes, ChunkDecoding& decoding) {
  const std::string doing = "reading " + shown_;
  const auto stored = hdf5::dataset_property(dataset.get(), H5Dget_type, doing);
  const auto value_bytes = static_cast<std::int64_t>(conversion_->stored_bytes());
  const auto creation = hdf5::dataset_property(dataset.get(), H5Dget_create_plist, doing);
  const auto layout = H5Pget_layout(creation.get());
  const auto filters = hdf5::filters(creation.get(), doing);
  auto shape = column_.shape;
  shape.insert(shape.begin(), rows_);

  if (layout == H5D_CHUNKED && rows_ > 0) measure_chunks(creation.get());

  if (conversion_->reads_file() && layout == H5D_CONTIGUOUS) {
    if (const auto offset = offset_of(dataset.get(), bytes)) {
      reader_ = std::make_unique<ContiguousColumn>(*offset, stored_row_bytes_, shown_);
      needs_hdf5_ = needs_memory_ = false;
      return;
    }
  } else if (conversion_->reads_file() && layout == H5D_CHUNKED && rows_ > 0) {
    hdf5::FilterPipeline pipeline(filters);
    hdf5::ChunkIndex index(dataset.get(), shown_);
    if (pipeline.decodes() && index.locates()) {
      ChunkLayout spread(shape, index.chunk_shape(), value_bytes, doing);
      needs_memory_ = !pipeline.is_plain(0) || !ChunkedColumn::reads_rows_alone(spread);
      reader_ = std::make_unique<ChunkedColumn>(std::move(dataset), stored.get(), std::move(index), std::move(pipeline),
                                                std::move(spread), decoding, shown_);
      return;
    }
  }
  hdf5::require_filters(filters, doing);
  hdf5::Handle memory_type(hdf5::check(H5Tcopy(conversion_->native_type()), doing), H5Tclose);
  conversion_->after_hdf5();
  auto library = std::make_unique<LibraryColumn>(std::move(dataset), std::move(memory_type), std::move(shape),
                                                 stored_row_bytes_, shown_);
  library_ = library.get();
  reader_ = std::move(library);
}

void Hdf5Column::measure_chunks(hid_t creation) {
  std::vector<hsize_t> chunk(column_.shape.size() + 1);
  hdf5::check(H5Pget_chunk(creation, static_cast<int>(chunk.size()), chunk.data()), "reading " + shown_);
  const auto chunks_along = [](std::int64_t size, hsize_t of_chunk) {
    return std::ceil(static_cast<double>(size) / static_cast<double>(of_chunk));
  };
  blocks_.rows = static_cast<std::int64_t>(std::min<hsize_t>(chunk[0], static_cast<hsize_t>(rows_)));
  blocks_.count = chunks_along(rows_, chunk[0]);
  blocks_.bytes = static_cast<double>(chunk[0]) * static_cast<double>(conversion_->stored_bytes());
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

std::optional<std::uint64_t> Hdf5Column::offset_of(hid_t dataset, const File& bytes) const {
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) {
    hdf5::last_error();
    return {};
  }
  const auto size = bytes.size();
  if (offset > size || static_cast<std::uint64_t>(rows_ * stored_row_bytes_) > size - offset)
    throw Error(ExitCode::data, "reading " + shown_, "the file is truncated: its values end beyond the end of the file",
                "Make or copy it again");
  return offset;
}

void Hdf5Column::expect(const File& bytes, std::span<const std::int64_t> rows) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file ahead");
  reader_->expect(bytes, rows);
}

void Hdf5Column::read(const File& bytes, std::span<const RowDestination> wanted) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file");
  if (conversion_->is_copy()) return reader_->read(bytes, wanted);
  // Stored values go to the end of their row, from where they are converted in place.
  std::vector<RowDestination> stored(wanted.begin(), wanted.end());
  for (auto& row : stored) row.into += row_bytes_ - stored_row_bytes_;
  reader_->read(bytes, stored);
  const auto values = static_cast<std::size_t>(stored_row_bytes_) / conversion_->stored_bytes();
  for (const auto& [row, into] : wanted)
    if ((*conversion_)(into, values) < values)
      throw Error(ExitCode::data, "reading " + shown_,
                  "row " + std::to_string(row) + " holds a number above 2^63 − 1, too large for a tensor",
                  "Convert it, or choose other columns");
}

}  // namespace muster::detail::data
