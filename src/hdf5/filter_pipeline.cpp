#include "hdf5/filter_pipeline.hpp"

#include "base/text.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/shuffle.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::hdf5 {
namespace {

constexpr std::size_t checksum_bytes = 4;
constexpr std::size_t most_filters = 32;  ///< the bits of a filter mask

[[noreturn]] void refuse(std::string_view doing, const std::string& fact) {
  throw Error(ExitCode::data, std::string(doing), fact, "The file is damaged; make or copy it again");
}

/// Removes the checksum from the end of `bytes`. False if it is wrong.
bool check_and_remove_checksum(std::span<const std::byte>& bytes) {
  if (bytes.size() < checksum_bytes) return false;
  const auto stored = bytes.last(checksum_bytes);
  bytes = bytes.first(bytes.size() - checksum_bytes);
  const auto sum = fletcher32(bytes);
  const auto byte = [&](int i) { return static_cast<std::byte>(sum >> 8 * i); };
  // HDF5 before 1.6.3 swapped the bytes of each half on little-endian machines; later ones read both.
  return std::ranges::equal(stored, std::array{byte(0), byte(1), byte(2), byte(3)}) ||
         std::ranges::equal(stored, std::array{byte(1), byte(0), byte(3), byte(2)});
}

}  // namespace

std::span<std::byte> Buffer::take(std::size_t bytes) {
  if (bytes > capacity_) {
    constexpr std::size_t min_bytes_in_pages = 128 << 10;  // smaller memory comes from new
    *this = {};
    // Encoded chunks differ little in size, and pages that are not used take no memory.
    const auto capacity = std::max(bytes, bytes / 2 * 3);
    if (bytes >= min_bytes_in_pages)
      pages_ = Pages::large(capacity);
    else
      memory_ = std::make_unique_for_overwrite<std::byte[]>(capacity);
    capacity_ = capacity;
  }
  return {pages_.data() != nullptr ? pages_.data() : memory_.get(), bytes};
}

FilterPipeline::FilterPipeline(std::vector<Filter> filters)
    : filters_(std::move(filters)), decodes_(filters_.size() <= most_filters) {
  int codecs = 0;
  for (const auto& filter : filters_) {
    if (filter.id == H5Z_FILTER_FLETCHER32) continue;
    if (filter.id == H5Z_FILTER_SHUFFLE) {
      decodes_ = decodes_ && filter.value(0) > 0;
      continue;
    }
    decodes_ = decodes_ && decoder_of(filter) != nullptr && ++codecs == 1;
  }
}

bool FilterPipeline::is_plain(std::uint32_t mask) const noexcept {
  for (std::size_t i = 0; i < filters_.size(); ++i)
    if ((mask >> i & 1) == 0) return false;
  return true;
}

void FilterPipeline::decode(std::span<const std::byte> stored, std::uint32_t mask, std::span<std::byte> into,
                            Workspace& workspace, std::string_view doing) const {
  std::vector<const Filter*> applied;
  std::size_t checksums = 0;  // how many of the filters that are not undone yet have added a checksum
  for (std::size_t i = 0; i < filters_.size(); ++i) {
    if ((mask >> i & 1) != 0) continue;
    applied.push_back(&filters_[i]);
    if (filters_[i].id == H5Z_FILTER_FLETCHER32) ++checksums;
  }
  const auto compresses = [](const Filter* filter) {
    return filter->id != H5Z_FILTER_FLETCHER32 && filter->id != H5Z_FILTER_SHUFFLE;
  };
  const auto refuse_size = [&](const std::string& by) {
    refuse(doing,
           str("its ", stored.size(), " stored bytes do not decode to ", into.size(), by.empty() ? "" : " by " + by));
  };

  auto bytes = stored;
  std::size_t buffer = 0;
  for (std::size_t left = applied.size(); left > 0; --left) {
    const auto& filter = *applied[left - 1];
    if (filter.id == H5Z_FILTER_FLETCHER32) {
      --checksums;
      if (!check_and_remove_checksum(bytes)) refuse(doing, "its checksum is wrong");
      continue;
    }
    // If a codec was applied before this filter, this filter's output is compressed data, which is as long as `bytes`.
    const auto codec =
        std::find_if(applied.begin(), applied.begin() + static_cast<std::ptrdiff_t>(left - 1), compresses);
    const bool is_compressed = codec != applied.begin() + static_cast<std::ptrdiff_t>(left - 1);
    const auto size = is_compressed ? bytes.size() : into.size() + checksum_bytes * checksums;
    const auto output = left == 1 ? into : workspace[buffer++ % 2].take(size);
    if (filter.id == H5Z_FILTER_SHUFFLE) {
      if (bytes.size() != size) refuse_size("");
      unshuffle(bytes, filter.value(0), output);
    } else if (bytes.empty() || !decoder_of(filter)(filter, bytes, output)) {  // liblzf reads a first byte in any case
      refuse_size(filter.text());
    }
    bytes = output;
  }
  if (bytes.size() != into.size()) refuse_size("");
  if (bytes.data() != into.data()) std::ranges::copy(bytes, into.begin());
}

}  // namespace muster::detail::hdf5
