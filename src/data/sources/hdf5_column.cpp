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
  column_.dtype = hdf5::scalar_type(stored.get(), shown_);
  unsigned_ = column_.dtype == at::kLong && H5Tget_size(stored.get()) == 8 && H5Tget_sign(stored.get()) == H5T_SGN_NONE;
  row_bytes_ = static_cast<std::int64_t>(c10::elementSize(column_.dtype));
  for (const auto size : shape) row_bytes_ = checked_product(row_bytes_, size, doing, "its shape");
  static_cast<void>(checked_product(row_bytes_, rows_, doing, "its shape"));
  if (row_bytes_ == 0)
    throw Error(ExitCode::data, doing, "its samples hold no values (a dimension is 0)", "Choose other columns");

  choose_reader(std::move(dataset), bytes, decoding);
}

void Hdf5Column::choose_reader(hdf5::Handle dataset, const File& bytes, ChunkDecoding& decoding) {
  const std::string doing = "reading " + shown_;
  const auto stored = hdf5::dataset_property(dataset.get(), H5Dget_type, doing);
  // Read as unsigned: HDF5 would turn values above 2^63 − 1 into the largest signed value.
  auto memory_type =
      unsigned_ ? hdf5::Handle(H5Tcopy(H5T_NATIVE_UINT64), H5Tclose) : hdf5::memory_type_of(column_.dtype);
  const auto creation = hdf5::dataset_property(dataset.get(), H5Dget_create_plist, doing);
  const auto layout = H5Pget_layout(creation.get());
  const auto filters = hdf5::filters(creation.get(), doing);
  auto shape = column_.shape;
  shape.insert(shape.begin(), rows_);

  if (layout == H5D_CHUNKED && rows_ > 0) measure_chunks(creation.get());

  const bool is_native = H5Tequal(stored.get(), memory_type.get()) > 0;
  if (is_native && layout == H5D_CONTIGUOUS) {
    if (const auto offset = offset_of(dataset.get(), bytes)) {
      reader_ = std::make_unique<ContiguousColumn>(*offset, row_bytes_, shown_);
      needs_hdf5_ = needs_memory_ = false;
      return;
    }
  } else if (is_native && layout == H5D_CHUNKED && rows_ > 0) {
    hdf5::FilterPipeline pipeline(filters);
    hdf5::ChunkIndex index(dataset.get(), shown_);
    if (pipeline.decodes() && index.locates()) {
      ChunkLayout spread(shape, index.chunk_shape(), static_cast<std::int64_t>(c10::elementSize(column_.dtype)), doing);
      needs_memory_ = !pipeline.is_plain(0) || !ChunkedColumn::reads_rows_alone(spread);
      reader_ = std::make_unique<ChunkedColumn>(std::move(dataset), memory_type.get(), std::move(index),
                                                std::move(pipeline), std::move(spread), decoding, shown_);
      return;
    }
  }
  hdf5::require_filters(filters, doing);
  auto library =
      std::make_unique<LibraryColumn>(std::move(dataset), std::move(memory_type), std::move(shape), row_bytes_, shown_);
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
  blocks_.bytes = static_cast<double>(chunk[0]) * static_cast<double>(c10::elementSize(column_.dtype));
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
  return static_cast<double>(rows_) * static_cast<double>(row_bytes_);
}

std::optional<std::uint64_t> Hdf5Column::offset_of(hid_t dataset, const File& bytes) const {
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) {
    hdf5::last_error();
    return {};
  }
  const auto size = bytes.size();
  if (offset > size || static_cast<std::uint64_t>(rows_ * row_bytes_) > size - offset)
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
  reader_->read(bytes, wanted);
  if (column_.dtype == at::kBool)  // a file may hold any byte, a bool only two
    for (const auto& [row, into] : wanted)
      std::transform(into, into + row_bytes_, into, [](std::byte b) { return std::byte{b != std::byte{0}}; });
  if (unsigned_)
    for (const auto& [row, into] : wanted)
      for (std::int64_t at = 0; at < row_bytes_; at += 8) {
        std::int64_t value = 0;
        std::memcpy(&value, into + at, sizeof value);
        if (value < 0)
          throw Error(ExitCode::data, "reading " + shown_,
                      "row " + std::to_string(row) + " holds a number above 2^63 − 1, too large for a tensor",
                      "Convert it, or choose other columns");
      }
}

}  // namespace muster::detail::data
