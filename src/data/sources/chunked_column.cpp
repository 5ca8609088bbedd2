#include "data/sources/chunked_column.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::data {
namespace {

bool are_worth_a_read(const std::vector<ByteRun>& runs) {
  return runs.size() == 1 || runs.front().bytes >= short_piece;
}

}  // namespace

/// Brings the wanted rows of each chunk to their destinations.
class ChunkedColumn::Use final : public ChunkUse {
 public:
  explicit Use(const ChunkedColumn& column) : column_(column) {}

  std::vector<WantedChunk> chunks;
  std::vector<std::span<const RowDestination>> rows;  ///< of each chunk

  void copy(std::size_t i, const std::byte* chunk) const override {
    std::vector<ByteRun> memory;
    each_run(i, column_.runs(chunks[i].number, memory), [chunk](const ByteRun& run, std::size_t at, std::byte* into) {
      std::memcpy(into, chunk + at, run.bytes);
    });
  }
  void fill(std::size_t i, std::span<const std::byte> value) const override {
    std::vector<ByteRun> memory;
    each_run(i, column_.runs(chunks[i].number, memory), [value](const ByteRun& run, std::size_t, std::byte* into) {
      for (std::size_t at = 0; at < run.bytes; at += value.size()) std::ranges::copy(value, into + at);
    });
  }
  bool read_directly(std::size_t i, std::uint64_t offset, ScatteredRead& pieces) const override {
    std::vector<ByteRun> memory;
    const auto& runs = column_.runs(chunks[i].number, memory);
    if (!are_worth_a_read(runs) && column_.chunks_->can_keep()) return false;
    each_run(i, runs,
             [&](const ByteRun& run, std::size_t at, std::byte* into) { pieces.add(offset + at, into, run.bytes); });
    return true;
  }

 private:
  /// Calls action(run, place of the run in the chunk, its destination) for each run of the wanted rows.
  void each_run(std::size_t i, const std::vector<ByteRun>& runs, auto&& action) const {
    const auto per_chunk = column_.layout_.rows_per_chunk();
    for (const auto& [row, into] : rows[i]) {
      const auto begin = static_cast<std::size_t>(row % per_chunk) * column_.layout_.row_bytes_in_chunk();
      for (const auto& run : runs) action(run, begin + run.in_chunk, into + run.in_row);
    }
  }

  const ChunkedColumn& column_;
};

ChunkedColumn::ChunkedColumn(std::unique_ptr<ChunkReader> chunks, ChunkLayout layout)
    : chunks_(std::move(chunks)), layout_(std::move(layout)) {
  if (layout_.chunks_per_row() == 1) runs_ = layout_.runs(0);
  if (reads_rows_alone()) chunks_->keep_none();
}

bool ChunkedColumn::reads_rows_alone() const { return chunks_->is_plain() && are_worth_a_read(layout_.runs(0)); }

void ChunkedColumn::read(const File& bytes, std::span<const RowDestination> wanted) {
  read_chunks(bytes, wanted, false);
}

void ChunkedColumn::expect(const File& bytes, std::span<const std::int64_t> rows) {
  if (reads_rows_alone()) return;
  std::vector<RowDestination> wanted;
  for (const auto row : rows) wanted.push_back({row, nullptr});
  read_chunks(bytes, wanted, true);
}

void ChunkedColumn::read_chunks(const File& bytes, std::span<const RowDestination> wanted, bool ahead) {
  constexpr std::size_t most_at_once = 1 << 16;  // chunks; a row of a damaged file may have any number
  Use use(*this);
  const auto read = [&] {
    ahead ? chunks_->expect(bytes, use.chunks) : chunks_->read(bytes, use.chunks, use);
    use.chunks.clear();
    use.rows.clear();
  };
  const auto per_chunk = layout_.rows_per_chunk(), per_row = layout_.chunks_per_row();
  for (std::size_t begin = 0, end = 0; begin < wanted.size(); begin = end) {
    const auto row_of_chunks = wanted[begin].row / per_chunk;
    while (end < wanted.size() && wanted[end].row / per_chunk == row_of_chunks) ++end;
    const auto rows = std::min(per_chunk, layout_.rows() - row_of_chunks * per_chunk);
    for (auto number = row_of_chunks * per_row; number < (row_of_chunks + 1) * per_row; ++number) {
      use.chunks.push_back({number, rows, ahead ? 0 : static_cast<std::int64_t>(end - begin)});
      use.rows.push_back(wanted.subspan(begin, end - begin));
      if (use.chunks.size() == most_at_once) read();
    }
  }
  read();
}

const std::vector<ByteRun>& ChunkedColumn::runs(std::int64_t number, std::vector<ByteRun>& memory) const {
  if (!runs_.empty()) return runs_;
  return memory = layout_.runs(number);
}

}  // namespace muster::detail::data
