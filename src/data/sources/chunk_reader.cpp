#include "data/sources/chunk_reader.hpp"

#include "base/cpus.hpp"
#include "base/memory_limit.hpp"
#include "base/page_size.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::size_t work_to_share = 1 << 20;  ///< bytes; to wake threads for less costs more than it saves
constexpr std::size_t requests_ahead = 16;      ///< chunks

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
  void each_piece(std::size_t, const Piece&) const override {}
  bool read_directly(std::size_t, std::uint64_t, ScatteredRead&) const override { return false; }
};

const NoUse no_use;

}  // namespace

void ChunkUse::copy(std::size_t i, const std::byte* chunk) const {
  each_piece(
      i, [&](std::size_t in_chunk, std::byte* into, std::size_t bytes) { std::memcpy(into, chunk + in_chunk, bytes); });
}

void ChunkUse::fill(std::size_t i, std::span<const std::byte> value) const {
  each_piece(i, [&](std::size_t, std::byte* into, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += value.size()) std::ranges::copy(value, into + at);
  });
}

std::byte* ChunkUse::whole(std::size_t i, std::size_t bytes) const {
  std::byte* begin = nullptr;
  std::size_t done = 0;
  bool is_whole = true;
  each_piece(i, [&](std::size_t in_chunk, std::byte* into, std::size_t of_piece) {
    if (done == 0) begin = into;
    is_whole = is_whole && in_chunk == done && into == begin + done;
    done += of_piece;
  });
  return is_whole && done == bytes ? begin : nullptr;
}

int decoding_threads() { return std::min(4, count_usable_cores() - 1); }

ChunkDecoding::ChunkDecoding(std::int64_t cache_bytes, std::function<int()> threads_)
    : cache(cache_bytes), threads("muster-decode", std::move(threads_)) {}

ChunkDecoding::~ChunkDecoding() = default;

void ChunkDecoding::read_directly_beyond_memory(double file_bytes, std::int64_t cache_bytes) {
  // About a quarter of the lanes have a chunk requested at a time. The cache has room for two chunks of each lane, so a
  // quarter of its size is enough for the requested chunks.
  constexpr std::int64_t least = 64 << 20;
  if (file_bytes > memory_limit()) direct.emplace(static_cast<std::size_t>(std::max(least, cache_bytes / 4)));
}

void ChunkDecoding::end_threads() {
  threads.rest();
  if (direct) direct->rest();
}

ChunkReader::ChunkReader(hdf5::Handle dataset, std::vector<std::byte> fill_value, hdf5::ChunkIndex index,
                         hdf5::FilterPipeline pipeline, std::size_t chunk_bytes, ChunkDecoding& decoding,
                         std::string shown)
    : dataset_(std::move(dataset)),
      pipeline_(std::move(pipeline)),
      chunk_bytes_(chunk_bytes),
      decoding_(decoding),
      shown_(std::move(shown)),
      places_(std::move(index), decoding.places_left),
      fill_value_(std::move(fill_value)) {
  if (places_.foreign()) decoding_.foreign.push_back(places_.foreign());
}

void ChunkReader::share(const std::string& origin) {
  group_ = decoding_.of_node.add(this, {static_cast<std::size_t>(places_.count()), chunk_bytes_}, origin);
}

void ChunkReader::read(const File& bytes, std::span<const WantedChunk> wanted, const ChunkUse& use) {
  if (wanted.empty()) return;
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!use_kept(wanted[i], i, use)) missing.push_back(i);
  read_missing(bytes, wanted, missing, use);
}

void ChunkReader::expect(const File& bytes, std::span<const WantedChunk> wanted, Ahead how) {
  if (!can_keep()) return;
  if (how == Ahead::decode)
    read(bytes, wanted, no_use);
  else
    request(bytes, wanted);
}

/// Has the system begin to read the chunks that are not kept.
void ChunkReader::request(const File& bytes, std::span<const WantedChunk> wanted) {
  std::vector<std::int64_t> numbers;
  for (const auto& chunk : wanted)
    if (decoding_.cache.find({this, chunk.number}, 0) == nullptr) numbers.push_back(chunk.number);
  if (const auto& foreign = places_.foreign()) {
    for (const auto number : numbers) foreign->will_read(number);
    return;
  }
  for (const auto& chunk : places_.of(numbers)) {
    if (!chunk.is_stored) continue;
    const bool tries_direct = decoding_.direct && chunk.bytes >= DirectReads::least_bytes;
    if (!tries_direct || !decoding_.direct->request(bytes, chunk.offset, chunk.bytes))
      bytes.will_read(chunk.offset, chunk.bytes);
  }
}

/// Uses a chunk that is in memory already. False if it is not.
bool ChunkReader::use_kept(const WantedChunk& wanted, std::size_t i, const ChunkUse& use) {
  if (const auto* const slots = this->slots())
    if (const auto* const chunk = slots->find(*group_, static_cast<std::size_t>(wanted.number))) {
      use.copy(i, chunk);
      return true;
    }
  const auto chunk = keeps_ ? decoding_.cache.find({this, wanted.number}, wanted.taken) : nullptr;
  if (!chunk) return false;
  use.copy(i, chunk.get());
  if (wanted.is_over && !has_come(wanted.number)) decoding_.cache.drop_taken({this, wanted.number});
  return true;
}

void ChunkReader::read_missing(const File& bytes, std::span<const WantedChunk> wanted,
                               std::span<const std::size_t> missing, const ChunkUse& use) {
  ThreadPool::throw_if_unwanted();
  std::vector<std::int64_t> numbers;
  numbers.reserve(missing.size());
  for (const auto i : missing) numbers.push_back(wanted[i].number);
  const auto stored = places_.of(numbers);
  ScatteredRead pieces(bytes, shown_);
  std::vector<ChunkToDecode> to_decode;
  for (std::size_t m = 0; m < missing.size(); ++m) {
    const bool is_plain = pipeline_.is_plain(stored[m].filter_mask) && stored[m].bytes == chunk_bytes_;
    if (!stored[m].is_stored)
      use.fill(missing[m], fill_value_);
    else if (!is_plain || !use.read_directly(missing[m], stored[m].offset, pieces))
      to_decode.push_back({wanted[missing[m]], stored[m], missing[m], &use});
  }
  pieces.finish();
  // In order are chunks without gaps that follow those of the last read, or begin with its last one.
  const auto next = wanted.back().number + 1, last_next = next_.exchange(next),
             ahead = last_next - wanted.front().number;
  const bool is_in_order = (ahead == 0 || ahead == 1) && next - wanted.front().number == std::ssize(wanted);
  if (is_in_order && !to_decode.empty() && missing.back() + 1 == wanted.size()) add_next(wanted.back(), to_decode);
  decode_all(bytes, to_decode);
}

/// Adds the chunks after `last` that are worth decoding along with these, because otherwise threads would have nothing
/// to do: the next batch of a pass in order needs them.
void ChunkReader::add_next(const WantedChunk& last, std::vector<ChunkToDecode>& chunks) {
  const auto threads = decoding_.threads.start() + 1;
  constexpr std::size_t many = 8;  // chunks per thread; with more, it hardly matters that some threads end early
  const auto least = std::max(chunks.size(), (work_to_share - 1) / chunk_bytes_ + 1);
  const auto wanted = (least + threads - 1) / threads * threads;
  if (threads == 1 || chunks.size() >= many * threads || !can_keep() ||
      !decoding_.cache.fits(2 * wanted * chunk_bytes_))
    return;
  std::vector<std::int64_t> numbers;
  for (auto number = last.number + 1; number < places_.count() && chunks.size() + numbers.size() < wanted; ++number) {
    if (use_kept({number, last.rows, 0}, 0, no_use)) break;
    numbers.push_back(number);
  }
  try {
    const auto stored = places_.of(numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (stored[i].is_stored) chunks.push_back({{numbers[i], last.rows, 0}, stored[i], 0, &no_use});
  } catch (const Error&) {  // the batch that needs the chunk meets the same error
  }
}

void ChunkReader::decode_all(const File& bytes, std::span<const ChunkToDecode> chunks) {
  const auto for_each = [&](std::span<const ChunkToDecode> of, const std::function<void(std::size_t)>& work) {
    const auto request = [&](std::size_t n) {
      if (n >= of.size()) return;
      if (const auto& foreign = places_.foreign()) return foreign->will_read(of[n].wanted.number);
      const auto& stored = of[n].stored;
      if (!(decoding_.direct && decoding_.direct->has(bytes, stored.offset)))
        bytes.will_read(stored.offset, stored.bytes);
    };
    const auto work_after_request = [&](std::size_t n) {
      request(n + requests_ahead);
      work(n);
    };
    // A disk is faster with several requests at a time than with only those of the threads that decode.
    for (std::size_t n = 1; n < requests_ahead; ++n) request(n);
    if (of.size() * chunk_bytes_ >= work_to_share) return decoding_.threads.run(of.size(), work_after_request);
    for (std::size_t n = 0; n < of.size(); ++n) work_after_request(n);
  };
  // Chunks that others are decoding come last: then most of them are ready.
  std::vector<char> is_claimed(chunks.size());  // not of bool, since threads write to neighbours
  for_each(chunks, [&](std::size_t n) {
    try {
      if (const auto* const slots = this->slots())
        is_claimed[n] = !decode_for_node(bytes, chunks[n], *slots);
      else
        decode_for_rank(bytes, chunks[n], can_keep());
    } catch (const Error&) {
      if (chunks[n].use != &no_use) throw;  // the batch that needs the chunk meets the same error
    }
  });
  std::vector<ChunkToDecode> left;
  for (std::size_t n = 0; n < chunks.size(); ++n)
    if (is_claimed[n] && chunks[n].use != &no_use) left.push_back(chunks[n]);
  for_each(left, [&](std::size_t n) {
    if (!use_kept(left[n].wanted, left[n].i, *left[n].use)) decode_for_rank(bytes, left[n], /*keep=*/false);
  });
}

/// Decodes a chunk for all ranks of the node. False if another rank or thread has claimed it.
bool ChunkReader::decode_for_node(const File& bytes, const ChunkToDecode& chunk, const node::SharedSlots& slots) {
  auto claim = slots.claim(*group_, static_cast<std::size_t>(chunk.wanted.number));
  if (!claim) return false;
  if (claim->reserve()) {
    map_pages(claim->memory());
    decode(bytes, chunk, claim->memory());
    claim->finish();
    chunk.use->copy(chunk.i, claim->memory().data());
  } else {
    claim.reset();
    decode_for_rank(bytes, chunk, can_keep());
  }
  return true;
}

/// Notes that the chunk is read in order. True if it was noted before; of far chunks nothing is noted.
bool ChunkReader::has_come(std::int64_t number) {
  const std::lock_guard lock(mutex_);
  come_.resize(static_cast<std::size_t>(std::min(places_.count(), ChunkPlaces::most_of_dataset)));
  if (std::cmp_greater_equal(number, come_.size())) return false;
  auto&& chunk = come_[static_cast<std::size_t>(number)];
  const bool before = chunk;
  chunk = true;
  return before;
}

/// Decodes a chunk for this rank alone. `keep`: in its cache. A chunk that is read in order is kept only from the
/// second time on: providing fresh memory takes long beside fast codecs, and many data are read once.
void ChunkReader::decode_for_rank(const File& bytes, const ChunkToDecode& chunk, bool keep) {
  thread_local hdf5::Buffer not_kept;
  const auto& wanted = chunk.wanted;
  auto* const whole = chunk.use->whole(chunk.i, chunk_bytes_);
  if (keep && (whole != nullptr || (wanted.is_over && wanted.taken == wanted.rows)))
    keep = has_come(wanted.number) && decoding_.cache.has_room(chunk_bytes_);
  if (whole != nullptr && !keep) return decode(bytes, chunk, {whole, chunk_bytes_});
  const auto kept = keep ? decoding_.cache.new_chunk(chunk_bytes_) : nullptr;
  const auto decoded = kept ? std::span(kept.get(), chunk_bytes_) : not_kept.take(chunk_bytes_);
  if (kept) map_pages(decoded);
  decode(bytes, chunk, decoded);
  chunk.use->copy(chunk.i, decoded.data());
  if (kept) decoding_.cache.keep({this, wanted.number}, kept, chunk_bytes_, wanted.rows, wanted.taken);
}

/// Reads a chunk and undoes its filters.
void ChunkReader::decode(const File& bytes, const ChunkToDecode& chunk, std::span<std::byte> into) const {
  if (const auto& foreign = places_.foreign()) return foreign->read(chunk.wanted.number, into);
  thread_local hdf5::Buffer input;
  thread_local hdf5::FilterPipeline::Workspace workspace;
  const auto& stored = chunk.stored;
  const auto read_into = [&](std::span<std::byte> memory) {
    ScatteredRead whole(bytes, shown_);
    whole.add(stored.offset, memory.data(), memory.size());
    whole.finish();
  };
  const bool is_plain = pipeline_.is_plain(stored.filter_mask) && stored.bytes == chunk_bytes_;
  const auto part = decoding_.direct ? decoding_.direct->take(bytes, stored.offset) : std::nullopt;
  if (is_plain && !part) return read_into(into);
  std::span<const std::byte> encoded;
  if (part) {
    encoded = part->bytes();
  } else {
    const auto memory = input.take(stored.bytes);
    read_into(memory);
    encoded = memory;
  }
  if (is_plain)
    std::ranges::copy(encoded, into.begin());
  else
    pipeline_.decode(encoded, stored.filter_mask, into, workspace,
                     "reading " + shown_ + ", " + places_.text(chunk.wanted.number));
}

}  // namespace muster::detail::data
