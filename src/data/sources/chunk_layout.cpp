#include "data/sources/chunk_layout.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

ChunkLayout::ChunkLayout(std::vector<std::int64_t> shape, std::vector<std::int64_t> chunk, std::int64_t value_bytes)
    : shape_(std::move(shape)),
      chunk_(std::move(chunk)),
      chunk_strides_(shape_.size() - 1),
      row_strides_(shape_.size() - 1),
      holds_whole_rows_(std::equal(shape_.begin() + 1, shape_.end(), chunk_.begin() + 1)),
      value_bytes_(static_cast<std::size_t>(value_bytes)),
      row_bytes_(value_bytes_),
      row_bytes_in_chunk_(value_bytes_) {
  for (std::size_t i = shape_.size(); i-- > 1;) {
    chunk_strides_[i - 1] = row_bytes_in_chunk_;
    row_strides_[i - 1] = row_bytes_;
    row_bytes_in_chunk_ *= static_cast<std::size_t>(chunk_[i]);
    row_bytes_ *= static_cast<std::size_t>(shape_[i]);
    chunks_per_row_ *= (shape_[i] - 1) / chunk_[i] + 1;
  }
}

ChunkLayout::Part ChunkLayout::part(std::int64_t number) const {
  Part part{std::vector<std::int64_t>(shape_.size() - 1)};
  for (std::size_t i = shape_.size(); i-- > 1;) {
    const auto chunks = (shape_[i] - 1) / chunk_[i] + 1, begin = number % chunks * chunk_[i];
    number /= chunks;
    part.size[i - 1] = std::min(chunk_[i], shape_[i] - begin);
    part.in_row += static_cast<std::size_t>(begin) * row_strides_[i - 1];
  }
  return part;
}

bool ChunkLayout::has_runs_of(std::size_t least, const Part& part) const {
  const Runs runs(part.size, chunk_strides_, row_strides_, value_bytes_);
  const auto is_one = std::all_of(part.size.begin(), part.size.begin() + static_cast<std::ptrdiff_t>(runs.outer),
                                  [](auto size) { return size == 1; });
  return is_one || runs.bytes >= least;
}

}  // namespace muster::detail::data
