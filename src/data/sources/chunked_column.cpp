#include "data/sources/chunked_column.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

namespace {

constexpr std::size_t most_chunks = 1 << 16;  ///< chunks; a row of a damaged file may have any number

}  // namespace

/// Brings the wanted rows of each chunk to their destinations.
class ChunkedColumn::Use final : public ChunkUse {
 public:
  explicit Use(const ChunkedColumn& column) : column_(column) {}

  std::vector<WantedChunk> chunks;
  std::vector<std::span<const RowDestination>> rows;  ///< of each chunk

  bool read_directly(std::size_t i, std::uint64_t offset, ScatteredRead& pieces) const override {
    const auto& layout = column_.layout_;
    const bool is_worth_it =
        layout.holds_whole_rows() || layout.has_runs_of(short_piece, layout.part(chunks[i].number));
    if (!is_worth_it && column_.chunks_->can_keep()) return false;
    each_piece(i, [&](std::size_t in_chunk, std::byte* into, std::size_t bytes) {
      pieces.add(offset + in_chunk, into, bytes);
    });
    return true;
  }
  void each_piece(std::size_t i, const Piece& action) const override {
    const auto& layout = column_.layout_;
    const auto offset = [&](std::int64_t row) {
      return static_cast<std::size_t>(row % layout.rows_per_chunk()) * layout.row_bytes_in_chunk();
    };
    if (layout.holds_whole_rows()) {
      for (const auto& [row, into] : rows[i]) action(offset(row), into, layout.row_bytes_in_chunk());
      return;
    }
    const auto part = layout.part(chunks[i].number);
    for (const auto& wanted : rows[i]) {
      const auto begin = offset(wanted.row);
      layout.each_run(part, [&](std::size_t in_chunk, std::size_t in_row, std::size_t bytes) {
        action(begin + in_chunk, wanted.into + in_row, bytes);
      });
    }
  }

 private:
  const ChunkedColumn& column_;
};

ChunkedColumn::ChunkedColumn(std::unique_ptr<ChunkReader> chunks, ChunkLayout layout)
    : chunks_(std::move(chunks)), layout_(std::move(layout)) {
  if (reads_rows_alone()) chunks_->keep_none();
}

bool ChunkedColumn::reads_rows_alone() const {
  return chunks_->is_plain() && layout_.has_runs_of(short_piece, layout_.part(0));
}

void ChunkedColumn::read(const File& bytes, std::span<const RowDestination> wanted) {
  Use use(*this);
  const auto read = [&] {
    chunks_->read(bytes, use.chunks, use);
    use.chunks.clear();
    use.rows.clear();
  };
  const auto per_chunk = layout_.rows_per_chunk();
  for (std::size_t begin = 0, end = 0; begin < wanted.size(); begin = end) {
    const auto row_of_chunks = wanted[begin].row / per_chunk;
    while (end < wanted.size() && wanted[end].row / per_chunk == row_of_chunks) ++end;
    const auto taken = static_cast<std::int64_t>(end - begin);
    const auto last = wanted[end - 1].row;
    const bool is_in_order = taken > 1 && last - wanted[begin].row == taken - 1;
    each_chunk(row_of_chunks, taken, [&](WantedChunk chunk) {
      chunk.is_over = is_in_order && last % per_chunk == chunk.rows - 1;
      use.chunks.push_back(chunk);
      use.rows.push_back(wanted.subspan(begin, end - begin));
      if (use.chunks.size() == most_chunks) read();
    });
  }
  read();
}

void ChunkedColumn::expect(const File& bytes, std::span<const RowRange> rows, Ahead how) {
  if (reads_rows_alone()) return;
  std::vector<WantedChunk> chunks;
  const auto expect = [&] {
    chunks_->expect(bytes, chunks, how);
    chunks.clear();
  };
  const auto per_chunk = layout_.rows_per_chunk();
  std::int64_t next = 0;  // row of chunks
  for (const auto& [first, last] : rows)
    for (next = std::max(next, first / per_chunk); next <= last / per_chunk; ++next)
      each_chunk(next, 0, [&](const WantedChunk& chunk) {
        chunks.push_back(chunk);
        if (chunks.size() == most_chunks) expect();
      });
  expect();
}

/// Calls action(chunk) for each chunk of a row of chunks, of which `taken` rows are taken.
void ChunkedColumn::each_chunk(std::int64_t row_of_chunks, std::int64_t taken, auto&& action) const {
  const auto per_chunk = layout_.rows_per_chunk(), per_row = layout_.chunks_per_row();
  const auto rows = std::min(per_chunk, layout_.rows() - row_of_chunks * per_chunk);
  for (auto number = row_of_chunks * per_row; number < (row_of_chunks + 1) * per_row; ++number)
    action(WantedChunk{number, rows, taken});
}

}  // namespace muster::detail::data
