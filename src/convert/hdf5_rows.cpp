#include "convert/hdf5_rows.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "convert/convert.hpp"
#include "hdf5/fields.hpp"
#include "hdf5/filters.hpp"
#include "hdf5/types.hpp"
#include "muster/error.hpp"
#include "zarr/open_file.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::convert {
namespace {

constexpr std::int64_t piece_bytes = 1 << 20;
constexpr std::int64_t most_row_bytes = 1 << 30;
constexpr std::int64_t most_chunks_at_once = 1 << 16;  ///< a row of a damaged file may have any number of them

/// Brings the rows of chunks to a piece.
class PieceUse final : public data::ChunkUse {
 public:
  /// `into`: the memory of the piece, which has the rows `first` … `first` + `count` − 1.
  PieceUse(const data::ChunkLayout& layout, std::int64_t first, std::int64_t count, std::byte* into)
      : layout_(layout), first_(first), end_(first + count), into_(into) {}

  std::vector<data::WantedChunk> chunks;

  void each_piece(std::size_t i, const Piece& action) const override {
    const auto rows = layout_.rows_per_chunk(), chunk_first = chunks[i].number / layout_.chunks_per_row() * rows;
    const auto begin = std::max(first_, chunk_first), end = std::min(end_, chunk_first + rows);
    const auto in_chunk = [&](std::int64_t row) {
      return static_cast<std::size_t>(row - chunk_first) * layout_.row_bytes_in_chunk();
    };
    const auto target = [&](std::int64_t row) {
      return into_ + static_cast<std::size_t>(row - first_) * layout_.row_bytes();
    };
    if (layout_.holds_whole_rows()) return action(in_chunk(begin), target(begin), in_chunk(end) - in_chunk(begin));
    const auto part = layout_.part(chunks[i].number);
    for (auto row = begin; row < end; ++row)
      layout_.each_run(part, [&](std::size_t at, std::size_t in_row, std::size_t bytes) {
        action(in_chunk(row) + at, target(row) + in_row, bytes);
      });
  }
  bool read_directly(std::size_t, std::uint64_t, data::ScatteredRead&) const override { return false; }

 private:
  const data::ChunkLayout& layout_;
  const std::int64_t first_, end_;
  std::byte* const into_;
};

}  // namespace

std::size_t consecutive(std::span<const std::int64_t> indices) noexcept {
  std::size_t count = std::min<std::size_t>(indices.size(), 1);
  while (count < indices.size() && indices[count] == indices[count - 1] + 1) ++count;
  return count;
}

Hdf5Group::Hdf5Group(const std::string& text)
    : place(text),
      file(zarr::open_file(place.path)),
      group(hdf5::open_group(file.get(), place.group, text)),
      bytes(zarr::main_file(place.path), File::Mode::read) {}

bool is_group(hid_t parent, const std::string& name) {
  const hdf5::Lock lock;
  const hdf5::Handle object(H5Oopen(parent, name.c_str(), H5P_DEFAULT), H5Oclose);
  if (!object) hdf5::last_error();
  return object && H5Iget_type(object.get()) == H5I_GROUP;
}

Hdf5Rows::Hdf5Rows(std::shared_ptr<const Hdf5Group> group, const std::string& name)
    : group_(std::move(group)), shown_(group_->place.shown(name)) {
  const hdf5::Lock lock;
  const std::string doing = "reading " + shown_;
  const auto [dataset_name, field] = hdf5::parts_of(group_->group.get(), name);
  dataset_ = hdf5::open_dataset(group_->group.get(), dataset_name, shown_);
  shape_ = hdf5::shape(dataset_.get(), shown_);
  if (!field.empty()) choose_field(field);
  const auto stored = stored_type();
  const auto type = hdf5::scalar_type(stored.get(), shown_);
  value_bytes_ = checked_cast<std::int64_t>(H5Tget_size(stored.get()), doing, "the size of a value");
  record_bytes_ = checked_cast<std::int64_t>(H5Tget_size(record_type().get()), doing, "the size of a value");
  whole_numbers_ = !c10::isFloatingType(type) && !c10::isComplexType(type);
  check_shape();

  const auto creation = hdf5::dataset_property(dataset_.get(), H5Dget_create_plist, doing);
  const auto filters = hdf5::filters(creation.get(), doing);
  rows_alone_ = filters.empty();
  if (H5Pget_layout(creation.get()) == H5D_CHUNKED) {
    hdf5::FilterPipeline pipeline(filters);
    hdf5::ChunkIndex index(dataset_.get(), shown_);
    rows_alone_ = rows_alone_ && !index.foreign();
    if (pipeline.decodes() && index.locates()) {
      auto bytes = record_bytes_;
      for (const auto size : index.chunk_shape())
        bytes = checked_product(bytes, size, doing, "the shape of its chunks");
      data::ChunkLayout layout(shape_, index.chunk_shape(), record_bytes_);
      auto fill_value = hdf5::fill_value(creation.get(), record_type().get(), doing);
      chunks_.emplace(
          std::make_unique<data::ChunkReader>(hdf5::Handle(), std::move(fill_value), std::move(index),
                                              std::move(pipeline), static_cast<std::size_t>(bytes), decoding_, shown_),
          std::move(layout));
    } else {
      hdf5::require_filters(filters, doing);
    }
  }
  choose_pieces();
}

void Hdf5Rows::choose_field(const std::string& field) {
  const std::string doing = "reading " + shown_;
  const auto record = record_type();
  field_type_ = hdf5::type_of_field(record.get(), field, doing);
  const auto index = static_cast<unsigned>(hdf5::check(H5Tget_member_index(record.get(), field.c_str()), doing));
  field_offset_ = H5Tget_member_offset(record.get(), index);
  only_field_ = {hdf5::check(H5Tcreate(H5T_COMPOUND, H5Tget_size(record.get())), doing), H5Tclose};
  hdf5::check(H5Tinsert(only_field_.get(), field.c_str(), field_offset_, field_type_.get()), doing);
}

void Hdf5Rows::check_shape() {
  const std::string doing = "reading " + shown_;
  if (shape_.empty())
    throw Error(ExitCode::data, doing, "it is a single value, not a column", "Choose columns with a first dimension");
  row_bytes_ = record_bytes_;
  for (std::size_t i = 1; i < shape_.size(); ++i)
    row_bytes_ = checked_product(row_bytes_, shape_[i], doing, "its shape");
  static_cast<void>(checked_product(row_bytes_, shape_.front(), doing, "its shape"));
  if (shape_.front() == 0) throw Error(ExitCode::data, doing, "it holds no sample", "Choose other columns");
  if (row_bytes_ == 0)
    throw Error(ExitCode::data, doing, "its samples hold no values (a dimension is 0)", "Choose other columns");
  if (row_bytes_ > most_row_bytes)
    throw Error(ExitCode::data, doing, str("a sample has ", row_bytes_, " bytes; the most are 1 GiB"),
                "Give an array whose first dimension counts the samples");
}

void Hdf5Rows::choose_pieces() {
  const auto rows_of = [&](std::int64_t bytes) { return std::max<std::int64_t>(1, bytes / row_bytes_); };
  piece_rows_ = std::min(shape_.front(), rows_of(piece_bytes));
  if (!chunks_ && rows_alone_) return;
  const auto creation = hdf5::dataset_property(dataset_.get(), H5Dget_create_plist, "reading " + shown_);
  const auto chunk = hdf5::chunk_shape(creation.get(), shape_.size(), "reading " + shown_);
  const auto of_chunk = std::min(chunk.front(), shape_.front());
  const bool is_one = std::ranges::equal(chunk.begin() + 1, chunk.end(), shape_.begin() + 1, shape_.end(),
                                         [](auto size, auto all) { return std::cmp_greater_equal(size, all); });
  if (of_chunk > rows_of(most_piece_bytes) && !is_one)
    piece_rows_ = rows_of(most_piece_bytes);
  else
    piece_rows_ = of_chunk * std::max<std::int64_t>(1, rows_of(piece_bytes) / of_chunk);
}

hdf5::Handle Hdf5Rows::record_type() const {
  const hdf5::Lock lock;
  if (only_field_) return {hdf5::check(H5Tcopy(only_field_.get()), "reading " + shown_), H5Tclose};
  return hdf5::dataset_property(dataset_.get(), H5Dget_type, "reading the type of " + shown_);
}

hdf5::Handle Hdf5Rows::stored_type() const {
  const hdf5::Lock lock;
  return field_type_ ? hdf5::Handle(hdf5::check(H5Tcopy(field_type_.get()), "reading " + shown_), H5Tclose)
                     : record_type();
}

hdf5::Handle Hdf5Rows::memory_type() const {
  const hdf5::Lock lock;
  const auto stored = stored_type();
  const auto type = hdf5::scalar_type(stored.get(), shown_);
  const bool is_enumeration = H5Tget_class(stored.get()) == H5T_ENUM && type != at::kBool;
  const hdf5::Handle number(is_enumeration ? H5Tget_super(stored.get()) : H5Tcopy(stored.get()), H5Tclose);
  if (H5Tget_class(number.get()) == H5T_INTEGER && H5Tget_sign(number.get()) == H5T_SGN_NONE)
    return NumberType{'u', static_cast<std::size_t>(value_bytes_)}.memory_type();
  return hdf5::memory_type_of(type);
}

void Hdf5Rows::read(std::int64_t first, std::int64_t count, std::span<std::byte> into) {
  if (!field_type_) return read_records(first, count, into);
  const auto step = std::max<std::int64_t>(1, piece_bytes / row_bytes_);
  for (std::int64_t done = 0; done < count; done += step) {
    const auto some = std::min(step, count - done);
    const auto records = records_.take(static_cast<std::size_t>(some * row_bytes_));
    read_records(first + done, some, records);
    take_field(records, into.subspan(static_cast<std::size_t>(done) * row_bytes()));
  }
}

void Hdf5Rows::read(std::span<const std::int64_t> rows, std::span<std::byte> into,
                    const std::function<void()>& between) {
  if (!field_type_) return read_records(rows, into, between);
  const auto step = static_cast<std::size_t>(std::max<std::int64_t>(1, most_piece_bytes / row_bytes_));
  for (std::size_t done = 0; done < rows.size(); done += step) {
    const auto some = rows.subspan(done, std::min(step, rows.size() - done));
    const auto records = records_.take(some.size() * static_cast<std::size_t>(row_bytes_));
    read_records(some, records, between);
    take_field(records, into.subspan(done * row_bytes()));
  }
}

void Hdf5Rows::take_field(std::span<const std::byte> records, std::span<std::byte> into) const {
  const auto bytes = static_cast<std::size_t>(value_bytes_), record = static_cast<std::size_t>(record_bytes_);
  auto* to = into.data();
  for (std::size_t at = 0; at < records.size(); at += record, to += bytes)
    std::memcpy(to, records.data() + at + field_offset_, bytes);
}

void Hdf5Rows::read_records(std::int64_t first, std::int64_t count, std::span<std::byte> into) {
  for (std::int64_t done = 0; done < count;) {
    const auto row = first + done;
    const auto from = row_in_piece(row);
    const auto rows = std::min(count - done, first_kept_ + kept_rows_ - row);
    std::memcpy(into.data() + done * row_bytes_, from, static_cast<std::size_t>(rows * row_bytes_));
    done += rows;
  }
}

void Hdf5Rows::read_records(std::span<const std::int64_t> rows, std::span<std::byte> into,
                            const std::function<void()>& between) {
  if (consecutive(rows) == rows.size()) {
    if (chunks_ || !rows_alone_)
      read_records(rows.front(), std::ssize(rows), into);
    else
      load(rows.front(), std::ssize(rows), into);
    return between();
  }
  std::vector<std::pair<std::int64_t, std::size_t>> wanted(rows.size());  // a row, and its place in `into`
  for (std::size_t i = 0; i < rows.size(); ++i) wanted[i] = {rows[i], i};
  std::ranges::sort(wanted);
  for (std::size_t begin = 0, end = 0; begin < wanted.size(); begin = end) {
    const auto piece = wanted[begin].first / piece_rows_;
    while (end < wanted.size() && wanted[end].first / piece_rows_ == piece) ++end;
    const bool sparse = is_sparse(end - begin);
    for (auto i = begin; i < end; ++i) {
      const auto [row, place] = wanted[i];
      const auto target =
          into.subspan(place * static_cast<std::size_t>(row_bytes_), static_cast<std::size_t>(row_bytes_));
      if (sparse)
        load_by_hdf5(row, 1, target);
      else
        std::memcpy(target.data(), row_in_piece(row), target.size());
    }
    between();
  }
}

/// True if reading a whole piece would read far more rows than are wanted of it.
bool Hdf5Rows::is_sparse(std::size_t wanted_rows) const noexcept {
  return rows_alone_ && std::cmp_less(8 * wanted_rows, piece_rows_);
}

const std::byte* Hdf5Rows::row_in_piece(std::int64_t row) {
  if (row < first_kept_ || row >= first_kept_ + kept_rows_) {
    kept_rows_ = 0;
    const auto first = row / piece_rows_ * piece_rows_, count = std::min(piece_rows_, shape_.front() - first);
    load(first, count, piece_.take(static_cast<std::size_t>(piece_rows_ * row_bytes_)));
    first_kept_ = first;
    kept_rows_ = count;
  }
  return piece_.take(static_cast<std::size_t>(piece_rows_ * row_bytes_)).data() + (row - first_kept_) * row_bytes_;
}

void Hdf5Rows::load(std::int64_t first, std::int64_t count, std::span<std::byte> into) {
  if (!chunks_) return load_by_hdf5(first, count, into);
  PieceUse use(chunks_->layout, first, count, into.data());
  const auto rows = chunks_->layout.rows_per_chunk(), in_row = chunks_->layout.chunks_per_row();
  const auto last = ((first + count - 1) / rows + 1) * in_row;
  for (auto number = first / rows * in_row; number < last;) {
    use.chunks.clear();
    while (number < last && std::ssize(use.chunks) < most_chunks_at_once) use.chunks.push_back({number++, rows, 0});
    chunks_->reader->read(group_->bytes, use.chunks, use);
  }
}

void Hdf5Rows::load_by_hdf5(std::int64_t first, std::int64_t count, std::span<std::byte> into) const {
  const std::string doing = "reading " + shown_;
  const hdf5::Lock lock;
  auto shape = shape_;
  shape.front() = count;
  const auto memory = hdf5::make_space(shape, doing);
  const auto space = hdf5::dataset_property(dataset_.get(), H5Dget_space, doing);
  hdf5::select_rows(space.get(), H5S_SELECT_SET, first, count, doing);
  hdf5::check(H5Dread(dataset_.get(), record_type().get(), memory.get(), space.get(), H5P_DEFAULT, into.data()), doing);
}

}  // namespace muster::detail::convert
