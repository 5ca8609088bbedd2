#include "data/sources/hdf5_column.hpp"

#include "base/number.hpp"
#include "hdf5/file.hpp"
#include "hdf5/filters.hpp"
#include "hdf5/types.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::size_t max_pieces = 1024;                      ///< IOV_MAX of Linux
constexpr std::size_t max_read_bytes = std::size_t{1} << 30;  ///< one preadv reads at most just under 2 GiB

/// Fills the pieces one after the other with the bytes of the file from `offset` on.
void read_pieces(const File& file, std::vector<iovec>& pieces, std::int64_t offset, const std::string& shown) {
  for (std::size_t next = 0; next < pieces.size();) {
    const auto got = ::preadv(file.descriptor(), pieces.data() + next,
                              static_cast<int>(std::min(max_pieces, pieces.size() - next)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(read_error_code(errno), "reading " + shown, std::strerror(errno), hdf5::retry_reading);
    if (got == 0)
      throw Error(ExitCode::data, "reading " + shown, "the file became shorter while it was in use",
                  "Do not change a dataset while it is read");
    offset += got;
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      auto& piece = pieces[next];
      const auto step = std::min(left, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + step;
      piece.iov_len -= step;
      left -= step;
      if (piece.iov_len == 0) ++next;
    }
  }
}

}  // namespace

Hdf5Column::Hdf5Column(hid_t file, const File& bytes, const std::string& name, std::string shown)
    : column_{name, at::kFloat, {}}, shown_(std::move(shown)) {
  const hdf5::Lock lock;
  const std::string doing = "reading " + shown_;
  dataset_ = hdf5::open_dataset(file, name, shown_);
  auto& shape = column_.shape;
  shape = hdf5::shape(dataset_.get(), shown_);
  if (shape.empty())
    throw Error(ExitCode::data, doing, "it is a single value, not a column", "Choose columns with a first dimension");
  rows_ = shape.front();
  shape.erase(shape.begin());

  const auto stored = hdf5::dataset_property(dataset_.get(), H5Dget_type, doing);
  column_.dtype = hdf5::scalar_type(stored.get(), shown_);
  unsigned_ = column_.dtype == at::kLong && H5Tget_size(stored.get()) == 8 && H5Tget_sign(stored.get()) == H5T_SGN_NONE;
  // Read as unsigned: HDF5 would turn values above 2^63 − 1 into the largest signed value.
  memory_type_ = unsigned_ ? hdf5::Handle(H5Tcopy(H5T_NATIVE_UINT64), H5Tclose) : hdf5::memory_type_of(column_.dtype);
  row_bytes_ = static_cast<std::int64_t>(c10::elementSize(column_.dtype));
  for (const auto size : shape) row_bytes_ = checked_product(row_bytes_, size, doing, "its shape");
  static_cast<void>(checked_product(row_bytes_, rows_, doing, "its shape"));
  if (row_bytes_ == 0)
    throw Error(ExitCode::data, doing, "its samples hold no values (a dimension is 0)", "Choose other columns");

  const auto creation = hdf5::dataset_property(dataset_.get(), H5Dget_create_plist, doing);
  hdf5::require_filters(hdf5::filters(creation.get(), doing), doing);
  if (H5Pget_layout(creation.get()) == H5D_CHUNKED) measure_chunks(creation.get());
  if (H5Pget_layout(creation.get()) == H5D_CONTIGUOUS && H5Tequal(stored.get(), memory_type_.get()) > 0) locate(bytes);
}

void Hdf5Column::locate(const File& bytes) {
  const haddr_t offset = H5Dget_offset(dataset_.get());
  if (offset == HADDR_UNDEF) {  // the values were never written; HDF5 reads the fill value
    hdf5::last_error();
    return;
  }
  const auto size = bytes.size();
  if (offset > size || static_cast<std::uint64_t>(rows_ * row_bytes_) > size - offset)
    throw Error(ExitCode::data, "reading " + shown_, "the file is truncated: its values end beyond the end of the file",
                "Make or copy it again");
  offset_ = static_cast<std::int64_t>(offset);
  dataset_ = {};
}

void Hdf5Column::measure_chunks(hid_t creation) {
  std::vector<hsize_t> chunk(column_.shape.size() + 1);
  hdf5::check(H5Pget_chunk(creation, static_cast<int>(chunk.size()), chunk.data()), "reading " + shown_);
  chunk_rows_ = static_cast<std::int64_t>(std::min<hsize_t>(chunk[0], static_cast<hsize_t>(rows_)));
  const auto chunks_along = [](std::int64_t size, hsize_t of_chunk) {
    return std::ceil(static_cast<double>(size) / static_cast<double>(of_chunk));
  };
  block_bytes_ = static_cast<double>(chunk[0]) * static_cast<double>(c10::elementSize(column_.dtype));
  double slots = std::exp2(std::ceil(std::log2(chunks_along(rows_, chunk[0]))));
  for (std::size_t i = 1; i < chunk.size(); ++i) {
    const auto chunks = chunks_along(column_.shape[i - 1], chunk[i]);
    block_bytes_ *= chunks * static_cast<double>(chunk[i]);
    slots *= std::exp2(std::ceil(std::log2(chunks)));
  }
  // HDF5 numbers chunks by the bits of their coordinates and keeps one chunk for each number modulo the slots.
  constexpr double fewest = 521, most = 1 << 20;
  chunk_slots_ = static_cast<std::size_t>(std::clamp(slots, fewest, most));
}

void Hdf5Column::keep_chunks(hid_t group, std::int64_t bytes) {
  const std::string doing = "reading " + shown_;
  const hdf5::Lock lock;
  const hdf5::Handle access(hdf5::check(H5Pcreate(H5P_DATASET_ACCESS), doing), H5Pclose);
  // w0 = 1: a chunk that was read to its end goes first, since this pass does not need it again.
  hdf5::check(H5Pset_chunk_cache(access.get(), chunk_slots_, static_cast<std::size_t>(bytes), /*w0=*/1.0), doing);
  dataset_ = {};  // while it is open its cache stays as it is
  dataset_ = hdf5::Handle(hdf5::check(H5Dopen2(group, column_.name.c_str(), access.get()), doing), H5Dclose);
}

void Hdf5Column::read(const File& bytes, std::span<const RowDestination> wanted) {
  const watch::ScopedFileRead reading;
  const watch::TraceSpan span("read file");
  if (is_direct()) {
    read_direct(bytes, wanted);
  } else if (cached_) {
    read_whole();
    for (const auto& [row, into] : wanted)
      std::memcpy(into, whole_.data() + row * row_bytes_, static_cast<std::size_t>(row_bytes_));
  } else {
    read_selected(wanted);
  }
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

void Hdf5Column::read_direct(const File& bytes, std::span<const RowDestination> wanted) const {
  const auto length = static_cast<std::size_t>(row_bytes_);
  const auto most_rows = static_cast<std::int64_t>(std::max<std::size_t>(1, max_read_bytes / length));
  std::vector<iovec> pieces;
  for (auto next = wanted.begin(); next != wanted.end();) {
    const auto first = next->row;
    pieces.clear();
    for (auto row = first; next != wanted.end() && next->row == row && row < first + most_rows; ++next, ++row) {
      if (!pieces.empty() && static_cast<std::byte*>(pieces.back().iov_base) + pieces.back().iov_len == next->into)
        pieces.back().iov_len += length;
      else
        pieces.push_back({next->into, length});
    }
    read_pieces(bytes, pieces, offset_ + first * row_bytes_, shown_);
  }
}

void Hdf5Column::read_selected(std::span<const RowDestination> wanted) const {
  const std::string doing = "reading " + shown_;
  constexpr std::size_t most_runs = 256;  // a selection of many more runs costs HDF5 more than it saves
  const hdf5::Lock lock;
  auto shape = column_.shape;
  shape.insert(shape.begin(), 0);
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

void Hdf5Column::read_whole() {
  const hdf5::Lock lock;
  if (!whole_.empty()) return;
  std::vector<std::byte> values(static_cast<std::size_t>(rows_ * row_bytes_));
  hdf5::check(H5Dread(dataset_.get(), memory_type_.get(), H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()),
              "reading " + shown_);
  whole_ = std::move(values);
  dataset_ = {};
}

}  // namespace muster::detail::data
