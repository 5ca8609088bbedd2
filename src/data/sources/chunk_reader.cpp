#include "data/sources/chunk_reader.hpp"

#include "base/page_size.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::size_t work_to_share = 1 << 20;  ///< bytes; to wake threads for less costs more than it saves
constexpr std::size_t most_requests = 16;       ///< to the disk, in advance
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

/// Chunks that are only to be kept.
class NoUse final : public ChunkUse {
 public:
  void copy(std::size_t, const std::byte*) const override {}
  void fill(std::size_t, std::span<const std::byte>) const override {}
  bool read_directly(std::size_t, std::uint64_t, ScatteredRead&) const override { return false; }
};

}  // namespace

ChunkReader::ChunkReader(hdf5::Handle dataset, hid_t stored, std::size_t value_bytes, hdf5::ChunkIndex index,
                         hdf5::FilterPipeline pipeline, std::size_t chunk_bytes, ChunkDecoding& decoding,
                         std::string shown)
    : dataset_(std::move(dataset)),
      pipeline_(std::move(pipeline)),
      chunk_bytes_(chunk_bytes),
      decoding_(decoding),
      shown_(std::move(shown)),
      places_(std::move(index), decoding.places_left),
      fill_value_(fill_value(dataset_.get(), stored, value_bytes, "reading " + shown_)) {}

void ChunkReader::read(const File& bytes, std::span<const WantedChunk> wanted, const ChunkUse& use) {
  std::vector<std::size_t> missing;
  missing.reserve(std::min(wanted.size(), most_at_once));
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (const auto chunk = keeps_ ? decoding_.cache.find({this, wanted[i].number}, wanted[i].taken) : nullptr)
      use.copy(i, chunk->take(chunk_bytes_).data());
    else
      missing.push_back(i);
    if (missing.size() == most_at_once) {
      read_missing(bytes, wanted, missing, use);
      missing.clear();
    }
  }
  read_missing(bytes, wanted, missing, use);
}

void ChunkReader::expect(const File& bytes, std::span<const WantedChunk> wanted, Ahead how) {
  if (!can_keep()) return;
  if (how == Ahead::decode)
    read(bytes, wanted, NoUse());
  else
    request(bytes, wanted);
}

/// Has the system begin to read the chunks that are not kept.
void ChunkReader::request(const File& bytes, std::span<const WantedChunk> wanted) {
  std::vector<std::int64_t> numbers;
  for (const auto& chunk : wanted)
    if (decoding_.cache.find({this, chunk.number}, 0) == nullptr) numbers.push_back(chunk.number);
  for (const auto& chunk : places_.of(numbers))
    if (chunk.is_stored) bytes.will_read(chunk.offset, chunk.bytes);
}

void ChunkReader::read_missing(const File& bytes, std::span<const WantedChunk> wanted,
                               std::span<const std::size_t> missing, const ChunkUse& use) {
  std::vector<std::int64_t> numbers;
  numbers.reserve(missing.size());
  for (const auto i : missing) numbers.push_back(wanted[i].number);
  const auto stored = places_.of(numbers);
  ScatteredRead pieces(bytes, shown_);
  std::vector<std::size_t> to_decode;
  for (std::size_t m = 0; m < missing.size(); ++m) {
    const bool is_plain = pipeline_.is_plain(stored[m].filter_mask) && stored[m].bytes == chunk_bytes_;
    if (!stored[m].is_stored)
      use.fill(missing[m], fill_value_);
    else if (!is_plain || !use.read_directly(missing[m], stored[m].offset, pieces))
      to_decode.push_back(m);
  }
  pieces.finish();
  // The disk is quicker with several requests at a time than with those of the threads that decode.
  for (std::size_t n = 1; n < std::min(to_decode.size(), most_requests); ++n)
    bytes.will_read(stored[to_decode[n]].offset, stored[to_decode[n]].bytes);
  const auto decode_one = [&](std::size_t n) {
    if (const auto later = n + most_requests; later < to_decode.size())
      bytes.will_read(stored[to_decode[later]].offset, stored[to_decode[later]].bytes);
    const auto m = to_decode[n], i = missing[m];
    decode(bytes, wanted[i], stored[m], i, use);
  };
  if (to_decode.size() * chunk_bytes_ >= work_to_share)
    decoding_.threads.run(to_decode.size(), decode_one);
  else
    for (std::size_t n = 0; n < to_decode.size(); ++n) decode_one(n);
}

void ChunkReader::decode(const File& bytes, const WantedChunk& wanted, const hdf5::StoredChunk& stored, std::size_t i,
                         const ChunkUse& use) {
  thread_local hdf5::Buffer input, not_kept;
  thread_local hdf5::FilterPipeline::Workspace workspace;
  const auto kept = can_keep() ? std::make_shared<hdf5::Buffer>() : nullptr;
  const auto chunk = kept ? kept->take(chunk_bytes_) : not_kept.take(chunk_bytes_);
  const auto read_into = [&](std::span<std::byte> into) {
    ScatteredRead whole(bytes, shown_);
    whole.add(stored.offset, into.data(), into.size());
    whole.finish();
  };
  if (pipeline_.is_plain(stored.filter_mask) && stored.bytes == chunk_bytes_) {
    read_into(chunk);
  } else {
    const auto encoded = input.take(stored.bytes);
    read_into(encoded);
    if (kept) map_pages(chunk);
    pipeline_.decode(encoded, stored.filter_mask, chunk, workspace,
                     "reading " + shown_ + ", " + places_.text(wanted.number));
  }
  use.copy(i, chunk.data());
  if (kept) decoding_.cache.keep({this, wanted.number}, kept, chunk_bytes_, wanted.rows, wanted.taken);
}

}  // namespace muster::detail::data
