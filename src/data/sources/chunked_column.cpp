#include "data/sources/chunked_column.hpp"

#include "base/page_size.hpp"
#include "data/sources/scattered_read.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::size_t short_run = 256;          ///< bytes; shorter ones are copied from memory, not read one by one
constexpr std::size_t work_to_share = 1 << 20;  ///< bytes; to wake threads for less costs more than it saves
constexpr std::size_t most_at_once = 1 << 16;   ///< chunks; a row of a damaged file may have any number

/// The value of chunks that were never written, as they would be stored. Zero if there is none.
std::vector<std::byte> fill_value(hid_t dataset, hid_t stored, std::size_t value_bytes, const std::string& doing) {
  const auto creation = hdf5::dataset_property(dataset, H5Dget_create_plist, doing);
  std::vector<std::byte> value(value_bytes);
  H5D_fill_value_t status{};
  H5D_fill_time_t time{};
  hdf5::check(H5Pfill_value_defined(creation.get(), &status), doing);
  hdf5::check(H5Pget_fill_time(creation.get(), &time), doing);
  if (status != H5D_FILL_VALUE_UNDEFINED && time != H5D_FILL_TIME_NEVER)
    hdf5::check(H5Pget_fill_value(creation.get(), stored, value.data()), doing);
  return value;
}

bool are_worth_a_read(const std::vector<ByteRun>& runs) { return runs.size() == 1 || runs.front().bytes >= short_run; }

/// Has the kernel provide the pages of a large piece of memory at once, which takes it half the time of doing so page
/// by page.
void map_pages(std::span<std::byte> memory) {
#ifdef MADV_POPULATE_WRITE
  const auto page = page_size();
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory.data()) + page - 1) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(memory.data() + memory.size()) / page * page;
  if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#else
  static_cast<void>(memory);
#endif
}

}  // namespace

ChunkedColumn::ChunkedColumn(hdf5::Handle dataset, hid_t stored, hdf5::ChunkIndex index, hdf5::FilterPipeline pipeline,
                             ChunkLayout layout, ChunkDecoding& decoding, std::string shown)
    : dataset_(std::move(dataset)),
      pipeline_(std::move(pipeline)),
      layout_(std::move(layout)),
      decoding_(decoding),
      shown_(std::move(shown)),
      places_(std::move(index), decoding.places_left),
      fill_value_(fill_value(dataset_.get(), stored, layout_.value_bytes(), "reading " + shown_)) {
  if (layout_.chunks_per_row() == 1) runs_ = layout_.runs(0);
  is_never_cached_ = pipeline_.is_plain(0) && runs_.size() == 1;
}

bool ChunkedColumn::reads_rows_alone(const ChunkLayout& layout) { return are_worth_a_read(layout.runs(0)); }

void ChunkedColumn::read(const File& bytes, std::span<const RowDestination> wanted) {
  std::vector<Part> missing;
  missing.reserve(std::min(wanted.size(), most_at_once));
  const auto rows = layout_.rows_per_chunk(), chunks = layout_.chunks_per_row();
  for (std::size_t begin = 0, end = 0; begin < wanted.size(); begin = end) {
    const auto row_of_chunks = wanted[begin].row / rows, first_row = row_of_chunks * rows;
    while (end < wanted.size() && wanted[end].row - first_row < rows) ++end;
    for (auto number = row_of_chunks * chunks; number < (row_of_chunks + 1) * chunks; ++number) {
      const Part part{number, first_row, wanted.subspan(begin, end - begin)};
      const auto chunk = is_never_cached_ ? nullptr : decoding_.cache.find({this, number}, std::ssize(part.wanted));
      if (chunk)
        copy(chunk->take(layout_.chunk_bytes()).data(), part);
      else
        missing.push_back(part);
      if (missing.size() == most_at_once) {
        read_parts(bytes, missing);
        missing.clear();
      }
    }
  }
  read_parts(bytes, missing);
}

void ChunkedColumn::expect(const File& bytes, std::span<const std::int64_t> wanted) {
  if (is_never_cached_ || !decoding_.cache.fits(layout_.chunk_bytes())) return;
  std::vector<Part> missing;
  const auto rows = layout_.rows_per_chunk(), chunks = layout_.chunks_per_row();
  std::int64_t last = -1;
  for (const auto row : wanted) {
    if (std::exchange(last, row / rows) == row / rows) continue;
    for (auto number = last * chunks; number < (last + 1) * chunks; ++number) {
      if (decoding_.cache.find({this, number}, 0) == nullptr) missing.push_back({number, last * rows, {}});
      if (missing.size() == most_at_once) {
        read_parts(bytes, missing);
        missing.clear();
      }
    }
  }
  read_parts(bytes, missing);
}

void ChunkedColumn::read_parts(const File& bytes, std::span<const Part> parts) {
  std::vector<std::int64_t> numbers;
  numbers.reserve(parts.size());
  for (const auto& part : parts) numbers.push_back(part.number);
  const auto stored = places_.of(numbers);
  ScatteredRead pieces(bytes, shown_);
  std::vector<std::size_t> to_decode;
  std::vector<ByteRun> memory;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!stored[i].is_stored) {
      fill(parts[i]);
      continue;
    }
    const auto& of_part = runs(parts[i].number, memory);
    if (!is_read_directly(stored[i], of_part)) {
      to_decode.push_back(i);
      continue;
    }
    each_run(parts[i], of_part, [&](const ByteRun& run, std::size_t place, std::byte* into) {
      pieces.add(stored[i].offset + place, into, run.bytes);
    });
  }
  pieces.finish();
  const auto decode_one = [&](std::size_t i) { decode(bytes, parts[to_decode[i]], stored[to_decode[i]]); };
  if (to_decode.size() * layout_.chunk_bytes() >= work_to_share)
    decoding_.threads.run(to_decode.size(), decode_one);
  else
    for (std::size_t i = 0; i < to_decode.size(); ++i) decode_one(i);
}

void ChunkedColumn::decode(const File& bytes, const Part& part, const hdf5::StoredChunk& stored) {
  thread_local hdf5::Buffer input, not_kept;
  thread_local hdf5::FilterPipeline::Workspace workspace;
  const auto size = layout_.chunk_bytes();
  const auto kept = decoding_.cache.fits(size) ? std::make_shared<hdf5::Buffer>() : nullptr;
  const auto chunk = kept ? kept->take(size) : not_kept.take(size);
  const auto read_into = [&](std::span<std::byte> into) {
    ScatteredRead whole(bytes, shown_);
    whole.add(stored.offset, into.data(), into.size());
    whole.finish();
  };
  if (pipeline_.is_plain(stored.filter_mask) && stored.bytes == size) {
    read_into(chunk);
  } else {
    const auto encoded = input.take(stored.bytes);
    read_into(encoded);
    if (kept) map_pages(chunk);
    pipeline_.decode(encoded, stored.filter_mask, chunk, workspace,
                     "reading " + shown_ + ", " + places_.text(part.number));
  }
  copy(chunk.data(), part);
  if (!kept) return;
  const auto rows = std::min(layout_.rows_per_chunk(), layout_.rows() - part.first_row);
  decoding_.cache.keep({this, part.number}, kept, size, rows, std::ssize(part.wanted));
}

bool ChunkedColumn::is_read_directly(const hdf5::StoredChunk& stored, const std::vector<ByteRun>& runs) const {
  return pipeline_.is_plain(stored.filter_mask) && stored.bytes == layout_.chunk_bytes() &&
         (are_worth_a_read(runs) || !decoding_.cache.fits(layout_.chunk_bytes()));
}

void ChunkedColumn::each_run(const Part& part, const std::vector<ByteRun>& runs, auto&& action) const {
  for (const auto& [row, into] : part.wanted) {
    const auto begin = static_cast<std::size_t>(row - part.first_row) * layout_.row_bytes_in_chunk();
    for (const auto& run : runs) action(run, begin + run.in_chunk, into + run.in_row);
  }
}

void ChunkedColumn::copy(const std::byte* chunk, const Part& part) const {
  std::vector<ByteRun> memory;
  each_run(part, runs(part.number, memory), [chunk](const ByteRun& run, std::size_t place, std::byte* into) {
    std::memcpy(into, chunk + place, run.bytes);
  });
}

void ChunkedColumn::fill(const Part& part) const {
  std::vector<ByteRun> memory;
  each_run(part, runs(part.number, memory), [this](const ByteRun& run, std::size_t, std::byte* into) {
    for (std::size_t at = 0; at < run.bytes; at += fill_value_.size()) std::ranges::copy(fill_value_, into + at);
  });
}

const std::vector<ByteRun>& ChunkedColumn::runs(std::int64_t number, std::vector<ByteRun>& memory) const {
  if (!runs_.empty()) return runs_;
  return memory = layout_.runs(number);
}

}  // namespace muster::detail::data
