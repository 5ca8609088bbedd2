#include "data/sources/chunk_places.hpp"

#include "muster/error.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr std::int64_t fewest = 64;             ///< places that a column may remember in any case
constexpr std::int64_t neighbours = 64;         ///< chunks; HDF5 finds so many in a row faster than a few far apart
constexpr std::size_t most_per_lock = 1 << 12;  ///< chunks that are looked up while HDF5's lock is held

}  // namespace

ChunkPlaces::ChunkPlaces(hdf5::ChunkIndex index, std::atomic<std::int64_t>& left) : index_(std::move(index)) {
  for (const auto chunks : index_.grid()) count_ *= chunks;
  if (foreign()) return;
  const auto wanted = std::bit_ceil(static_cast<std::uint64_t>(std::min(count_, most_of_dataset)));
  const auto available = std::bit_floor(static_cast<std::uint64_t>(std::max(fewest, left.load())));
  slots_ = std::min(wanted, available);
  left -= static_cast<std::int64_t>(slots_);
}

std::vector<hdf5::StoredChunk> ChunkPlaces::of(std::span<const std::int64_t> numbers) {
  if (foreign()) return index_.locate(numbers);
  std::vector<hdf5::StoredChunk> chunks(numbers.size());
  std::vector<std::int64_t> unknown;
  const auto fill_in = [&] {
    const std::lock_guard lock(mutex_);
    known_.resize(slots_);
    unknown.clear();
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (const auto& slot = slot_of(numbers[i]); slot.number == numbers[i])
        chunks[i] = slot.chunk;
      else
        unknown.push_back(numbers[i]);
  };
  fill_in();
  if (!unknown.empty() && std::cmp_greater_equal(slots_, count_)) {
    look_up_neighbours(unknown);
    fill_in();
  }
  // If there are fewer slots than chunks, these are all chunks that are not remembered. Otherwise they are chunks that
  // look_up_neighbours() could not locate together with their neighbours.
  for (std::size_t i = 0, done = 0; done < unknown.size();) {
    const auto some = std::span(unknown).subspan(done, std::min(most_per_lock, unknown.size() - done));
    const auto located = index_.locate(some);
    for (std::size_t j = 0; j < some.size(); ++j, ++i) {
      while (numbers[i] != some[j]) ++i;
      chunks[i] = located[j];
    }
    remember(some, located);
    done += some.size();
  }
  return chunks;
}

void ChunkPlaces::look_up_neighbours(std::span<const std::int64_t> numbers) {
  std::vector<std::int64_t> wanted;
  for (const auto number : numbers) {
    if (!wanted.empty() && number <= wanted.back()) continue;
    const auto begin = number / neighbours * neighbours;
    for (auto next = begin; next < std::min(begin + neighbours, count_); ++next) wanted.push_back(next);
  }
  for (std::size_t done = 0; done < wanted.size(); done += most_per_lock) {
    const auto some = std::span(wanted).subspan(done, std::min(most_per_lock, wanted.size() - done));
    try {
      remember(some, index_.locate(some));
    } catch (const Error&) {  // perhaps of a chunk that nobody has asked for
    }
  }
}

void ChunkPlaces::remember(std::span<const std::int64_t> numbers, std::span<const hdf5::StoredChunk> chunks) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < numbers.size(); ++i) slot_of(numbers[i]) = {numbers[i], chunks[i]};
}

}  // namespace muster::detail::data
