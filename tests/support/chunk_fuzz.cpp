#include "support/chunk_fuzz.hpp"

#include "hdf5/codecs.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "muster/error.hpp"
#include "support/chunk_encoders.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::test {
namespace {

using namespace detail::hdf5;
using Random = std::mt19937_64;

constexpr int damages = 8;  ///< of each chunk

/// Memory that ends before a page on which every access is fatal.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), used = (bytes + page - 1) / page * page;
    mapped_ = used + page;
    auto* const begin = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<std::byte*>(begin);
    ::mprotect(begin_ + used, page, PROT_NONE);
    offset_ = used - bytes;
  }
  GuardedMemory(const GuardedMemory&) = delete;
  ~GuardedMemory() { ::munmap(begin_, mapped_); }

  std::span<std::byte> bytes() const { return {begin_ + offset_, bytes_}; }

 private:
  std::size_t bytes_, mapped_ = 0, offset_ = 0;
  std::byte* begin_ = nullptr;
};

std::size_t below(Random& random, std::size_t bound) { return random() % bound; }

bool keeps_whole_values(const Filter& filter) { return filter.id != H5Z_FILTER_SZIP && filter.id != filter_bitshuffle; }

/// At most one filter that compresses, with shuffle before it and a checksum before or after it.
std::vector<Filter> random_filters(Random& random, std::size_t value_bytes) {
  const auto known = known_filters(value_bytes);
  const auto& shuffle = known[0];
  const auto& checksum = known[1];
  std::vector<Filter> filters;
  if (below(random, 2) == 0) filters.push_back(shuffle);
  if (below(random, 8) != 0) {
    const auto& codec = known[2 + below(random, known.size() - 2)];
    if (below(random, 4) == 0 && keeps_whole_values(codec)) filters.push_back(checksum);
    filters.push_back(codec);
  }
  if (below(random, 4) == 0) filters.push_back(checksum);
  return filters;
}

void damage(Random& random, Bytes& bytes) {
  static constexpr std::array<std::byte, 5> special{std::byte{0}, std::byte{1}, std::byte{0x7f}, std::byte{0x80},
                                                    std::byte{0xff}};
  switch (below(random, 6)) {
    case 0:
      bytes.resize(below(random, bytes.size() + 1));
      return;
    case 1:
      bytes.resize(bytes.size() + 1 + below(random, 64), std::byte{0xff});
      return;
    case 2:
      for (auto& byte : bytes) byte = static_cast<std::byte>(random());
      return;
    default:
      break;
  }
  // Headers and the sizes in them are at the beginning.
  for (auto changes = 1 + below(random, 4); changes > 0 && !bytes.empty(); --changes) {
    const auto range = below(random, 2) == 0 ? bytes.size() : std::min<std::size_t>(bytes.size(), 32);
    auto& byte = bytes[below(random, range)];
    byte = below(random, 2) == 0 ? special[below(random, special.size())] : static_cast<std::byte>(random());
  }
}

void decode(const FilterPipeline& pipeline, const Bytes& stored, std::uint32_t mask, std::span<std::byte> into) {
  const GuardedMemory copy(stored.size());
  std::ranges::copy(stored, copy.bytes().begin());
  FilterPipeline::Workspace workspace;
  pipeline.decode(copy.bytes(), mask, into, workspace, "reading a chunk");
}

}  // namespace

void fuzz_chunk(std::uint64_t seed) {
  Random random(seed);
  const std::size_t value_bytes = std::array{1, 2, 4, 8}[below(random, 4)];
  const auto count = 1 + below(random, below(random, 8) == 0 ? 20000 : 600);
  auto filters = random_filters(random, value_bytes);
  const std::uint32_t mask = below(random, 4) == 0 ? static_cast<std::uint32_t>(random()) : 0;
  const auto chunk = smooth_values(random, count, value_bytes);
  auto stored = encoded(filters, mask, chunk);
  const FilterPipeline pipeline(filters);
  const GuardedMemory into(chunk.size());
  std::string shown = "seed " + std::to_string(seed) + ":";
  for (const auto& filter : filters) shown += " " + filter.text();
  if (!pipeline.decodes()) throw std::runtime_error(shown + " are not all known");
  decode(pipeline, stored, mask, into.bytes());
  if (!std::ranges::equal(into.bytes(), chunk)) throw std::runtime_error(shown + " decode to something else");

  for (int i = 0; i < damages; ++i) {
    auto damaged = stored;
    damage(random, damaged);
    try {
      decode(pipeline, damaged, mask, into.bytes());
    } catch (const Error&) {  // as it should be, unless the damage does not matter
    }
  }
}

}  // namespace muster::test
