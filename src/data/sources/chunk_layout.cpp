#include "data/sources/chunk_layout.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

ChunkLayout::ChunkLayout(std::vector<std::int64_t> shape, std::vector<std::int64_t> chunk, std::int64_t value_bytes)
    : shape_(std::move(shape)),
      chunk_(std::move(chunk)),
      value_bytes_(static_cast<std::size_t>(value_bytes)),
      row_bytes_in_chunk_(value_bytes_) {
  for (std::size_t i = shape_.size(); i-- > 1;) {
    row_bytes_in_chunk_ *= static_cast<std::size_t>(chunk_[i]);
    chunks_per_row_ *= (shape_[i] - 1) / chunk_[i] + 1;
  }
}

std::vector<ByteRun> ChunkLayout::runs(std::int64_t number) const {
  // What the chunk and the row have in common: a box, of which each dimension counts its runs.
  struct Dimension {
    std::int64_t count, chunk_stride, row_stride;
  };
  std::vector<Dimension> outer;  // the last dimension first
  auto run = static_cast<std::int64_t>(value_bytes_);
  std::int64_t chunk_stride = run, row_stride = run, row_begin = 0;
  for (std::size_t i = shape_.size(); i-- > 1;) {
    const auto chunks = (shape_[i] - 1) / chunk_[i] + 1, at = number % chunks * chunk_[i];
    number /= chunks;
    const auto count = std::min(chunk_[i], shape_[i] - at);
    row_begin += at * row_stride;
    if (outer.empty() && run == chunk_stride && run == row_stride)
      run *= count;
    else
      outer.push_back({count, chunk_stride, row_stride});
    chunk_stride *= chunk_[i];
    row_stride *= shape_[i];
  }
  std::vector<ByteRun> runs{{0, static_cast<std::size_t>(row_begin), static_cast<std::size_t>(run)}};
  for (const auto& dimension : outer) {
    // The runs so far are those of its first index; the others follow them, and all are in ascending order.
    const auto below = runs.size();
    for (std::int64_t index = 1; index < dimension.count; ++index)
      for (std::size_t i = 0; i < below; ++i)
        runs.push_back({runs[i].in_chunk + static_cast<std::size_t>(index * dimension.chunk_stride),
                        runs[i].in_row + static_cast<std::size_t>(index * dimension.row_stride), runs[i].bytes});
  }
  return runs;
}

}  // namespace muster::detail::data
