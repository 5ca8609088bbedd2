#include "data/sources/box_reader.hpp"

#include "base/runs.hpp"
#include "data/sources/scattered_read.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace muster::detail::data {
namespace {

/// Bytes; reading a piece by itself takes about as long as reading so many in sequence.
constexpr std::size_t cost_of_piece = 4096;

std::size_t offset_of(std::span<const std::int64_t> at, std::span<const std::size_t> strides) {
  std::size_t offset = 0;
  for (std::size_t d = 0; d < at.size(); ++d) offset += static_cast<std::size_t>(at[d]) * strides[d];
  return offset;
}

class UnchunkedArrayReader final : public BoxReader {
 public:
  explicit UnchunkedArrayReader(StoredArray array) : BoxReader(std::move(array)), strides_(array_.strides()) {}

  bool reads_directly(std::int64_t) const override { return true; }

  void read(const File& bytes, std::span<const Box> boxes, std::span<const std::size_t> strides) override {
    ScatteredRead pieces(bytes, array_.shown);
    for (const auto& box : boxes) {
      const auto begin = *array_.offset + offset_of(box.begin, strides_);
      each_run(box.size, strides_, strides, array_.conversion.stored_bytes(),
               [&](std::size_t in_file, std::size_t in_memory, std::size_t length) {
                 pieces.add(begin + in_file, box.into + in_memory, length);
               });
    }
    pieces.finish();
  }

 private:
  std::vector<std::size_t> strides_;
};

class ChunkedArrayReader final : public BoxReader {
 public:
  explicit ChunkedArrayReader(StoredArray array)
      : BoxReader(std::move(array)),
        strides_(array_.chunk_strides()),
        chunk_bytes_(static_cast<std::size_t>(array_.chunk.front()) * strides_.front()) {
    for (std::size_t d = 0; d < array_.shape.size(); ++d) grid_.push_back((array_.shape[d] - 1) / array_.chunk[d] + 1);
  }

  bool reads_directly(std::int64_t last) const override {
    const auto run = static_cast<std::size_t>(std::min(last, array_.chunk.back())) * array_.conversion.stored_bytes();
    return array_.chunks->is_plain() && run >= short_piece;
  }

  void read(const File& bytes, std::span<const Box> boxes, std::span<const std::size_t> strides) override;
  void expect(const File& bytes, std::span<const Box> boxes, Ahead how) override;

 private:
  /// A chunk and a box that shares values with it.
  struct Part {
    std::int64_t chunk;
    std::size_t box;
  };
  class Use;

  /// Calls action(parts) for some boxes at a time, so that the parts take little memory.
  template <class Action>
  void in_groups(std::span<const Box> boxes, Action&& action) const {
    constexpr std::size_t most_at_once = 1 << 16;
    std::vector<Part> parts;
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      add_parts(boxes[i], i, parts);
      if (parts.size() < most_at_once && i + 1 < boxes.size()) continue;
      std::ranges::stable_sort(parts, {}, &Part::chunk);
      action(parts);
      parts.clear();
    }
  }

  void add_parts(const Box& box, std::size_t i, std::vector<Part>& parts) const {
    std::vector<std::int64_t> first, counts, at(grid_.size(), 0);
    for (std::size_t d = 0; d < grid_.size(); ++d) {
      first.push_back(box.begin[d] / array_.chunk[d]);
      counts.push_back((box.begin[d] + box.size[d] - 1) / array_.chunk[d] - first[d] + 1);
    }
    while (true) {
      std::int64_t number = 0;
      for (std::size_t d = 0; d < grid_.size(); ++d) number = number * grid_[d] + first[d] + at[d];
      parts.push_back({number, i});
      auto d = grid_.size();
      for (; d > 0 && ++at[d - 1] == counts[d - 1]; --d) at[d - 1] = 0;
      if (d == 0) return;
    }
  }

  std::vector<std::size_t> strides_;
  std::size_t chunk_bytes_;
  std::vector<std::int64_t> grid_;
};

/// Brings the shared values of chunks and boxes to the boxes' memory.
class ChunkedArrayReader::Use final : public ChunkUse {
 public:
  /// `parts`: sorted by chunk.
  Use(const ChunkedArrayReader& reader, std::span<const Box> boxes, std::span<const std::size_t> strides,
      std::span<const Part> parts)
      : reader_(reader), boxes_(boxes), strides_(strides) {
    while (!parts.empty()) {
      const auto end = std::ranges::find_if(parts, [&](const Part& part) { return part.chunk != parts.front().chunk; });
      const auto count = static_cast<std::size_t>(end - parts.begin());
      // Other windows need the same chunks again. So no chunk counts as taken, and the cache drops the least recently
      // used.
      chunks_.push_back({parts.front().chunk, std::numeric_limits<std::int64_t>::max(), 0});
      parts_.push_back(parts.first(count));
      parts = parts.subspan(count);
    }
  }

  std::span<const WantedChunk> chunks() const { return chunks_; }

  bool read_directly(std::size_t i, std::uint64_t offset, ScatteredRead& pieces) const override {
    std::size_t pieces_of_chunk = 0, shortest = short_piece;
    each_piece(i, [&](std::size_t, std::byte*, std::size_t bytes) {
      ++pieces_of_chunk;
      shortest = std::min(shortest, bytes);
    });
    const bool is_worth_it = shortest == short_piece || pieces_of_chunk * cost_of_piece < reader_.chunk_bytes_;
    if (!is_worth_it && reader_.array_.chunks->can_keep()) return false;
    each_piece(i, [&](std::size_t in_chunk, std::byte* into, std::size_t bytes) {
      pieces.add(offset + in_chunk, into, bytes);
    });
    return true;
  }
  void each_piece(std::size_t i, const Piece& action) const override {
    const auto& chunk = reader_.array_.chunk;
    const auto rank = chunk.size();
    std::vector<std::int64_t> origin(rank), in_chunk(rank), in_box(rank), size(rank);
    auto number = chunks_[i].number;
    for (auto d = rank; d-- > 0; number /= reader_.grid_[d]) origin[d] = number % reader_.grid_[d] * chunk[d];
    for (const auto& part : parts_[i]) {
      const auto& box = boxes_[part.box];
      for (std::size_t d = 0; d < rank; ++d) {
        const auto begin = std::max(origin[d], box.begin[d]);
        in_chunk[d] = begin - origin[d];
        in_box[d] = begin - box.begin[d];
        size[d] = std::min(origin[d] + chunk[d], box.begin[d] + box.size[d]) - begin;
      }
      const auto from = offset_of(in_chunk, reader_.strides_);
      auto* const into = box.into + offset_of(in_box, strides_);
      each_run(size, reader_.strides_, strides_, reader_.array_.conversion.stored_bytes(),
               [&](std::size_t a, std::size_t b, std::size_t bytes) { action(from + a, into + b, bytes); });
    }
  }

 private:
  const ChunkedArrayReader& reader_;
  std::span<const Box> boxes_;
  std::span<const std::size_t> strides_;
  std::vector<WantedChunk> chunks_;
  std::vector<std::span<const Part>> parts_;  ///< of each chunk
};

void ChunkedArrayReader::read(const File& bytes, std::span<const Box> boxes, std::span<const std::size_t> strides) {
  in_groups(boxes, [&](const std::vector<Part>& parts) {
    const Use use(*this, boxes, strides, parts);
    array_.chunks->read(bytes, use.chunks(), use);
  });
}

void ChunkedArrayReader::expect(const File& bytes, std::span<const Box> boxes, Ahead how) {
  in_groups(boxes, [&](const std::vector<Part>& parts) {
    const Use use(*this, boxes, {}, parts);
    array_.chunks->expect(bytes, use.chunks(), how);
  });
}

/// For values that HDF5 must convert or decode.
class LibraryArrayReader final : public BoxReader {
 public:
  explicit LibraryArrayReader(StoredArray array)
      : BoxReader(std::move(array)), values_(array_.library()), strides_(array_.strides()) {}

  bool reads_directly(std::int64_t) const override { return false; }
  LibraryArray* library() noexcept override { return &values_; }

  void read(const File&, std::span<const Box> boxes, std::span<const std::size_t> strides) override {
    const hdf5::Lock lock;
    const auto* const whole = values_.whole();
    std::vector<std::byte> of_box;
    for (const auto& box : boxes) {
      auto from_strides = strides_;
      const auto* from = whole;
      if (whole != nullptr) {
        from += offset_of(box.begin, strides_);
      } else {
        from_strides = strides_of(box.size, array_.conversion.stored_bytes());
        of_box.resize(static_cast<std::size_t>(box.size.front()) * from_strides.front());
        read_box(box, of_box.data());
        from = of_box.data();
      }
      each_run(box.size, from_strides, strides, array_.conversion.stored_bytes(),
               [&](std::size_t a, std::size_t b, std::size_t bytes) { std::memcpy(box.into + b, from + a, bytes); });
    }
  }

 private:
  void read_box(const Box& box, std::byte* into) const {
    const auto space = values_.space();
    const std::vector<hsize_t> begin(box.begin.begin(), box.begin.end()), size(box.size.begin(), box.size.end());
    hdf5::check(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, begin.data(), nullptr, size.data(), nullptr),
                "reading " + array_.shown);
    values_.read(space.get(), box.size, into);
  }

  LibraryArray values_;
  std::vector<std::size_t> strides_;
};

}  // namespace

std::unique_ptr<BoxReader> make_box_reader(StoredArray array) {
  if (array.offset) return std::make_unique<UnchunkedArrayReader>(std::move(array));
  if (array.chunks) return std::make_unique<ChunkedArrayReader>(std::move(array));
  return std::make_unique<LibraryArrayReader>(std::move(array));
}

}  // namespace muster::detail::data
