#include "zarr/chunks.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/chunk_index.hpp"
#include "hdf5/filter_pipeline.hpp"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace muster::detail::zarr {
namespace {

constexpr std::uint64_t missing = std::numeric_limits<std::uint64_t>::max();
constexpr std::size_t most_index_bytes = 64 << 20;  ///< of indexes of shards that an array keeps
constexpr std::size_t most_requested = 64;          ///< chunks whose files stay open until they are read

std::uint32_t checksum_of(const void* bytes, std::size_t size, std::uint32_t before) {
  return static_cast<std::uint32_t>(::crc32_z(before, static_cast<const unsigned char*>(bytes), size));
}

class Chunks final : public hdf5::ForeignChunks {
 public:
  Chunks(std::shared_ptr<const StoreFiles> files, std::string folder, ArrayMetadata metadata, std::string shown,
         const std::string& metadata_text)
      : files_(std::move(files)),
        folder_(std::move(folder)),
        metadata_(std::move(metadata)),
        shown_(std::move(shown)),
        metadata_checksum_(checksum_of(metadata_text.data(), metadata_text.size(), 0)) {
    for (std::size_t d = 0; d < metadata_.shape.size(); ++d) {
      const auto chunk = metadata_.chunk[d];
      grid_.push_back(metadata_.shape[d] / chunk + (metadata_.shape[d] % chunk != 0 ? 1 : 0));
      in_shard_.push_back(metadata_.shard.empty() ? 1 : metadata_.shard[d] / chunk);
    }
  }

  void read(std::int64_t number, std::span<std::byte> into) const override {
    const auto place = take_requested(number);
    if (!place) {
      const auto& value = metadata_.fill_value;
      for (std::size_t at = 0; at < into.size(); at += value.size())
        std::memcpy(into.data() + at, value.data(), value.size());
      return;
    }
    const auto& codecs = *metadata_.codecs;
    if (place->bytes > codecs.most_encoded_bytes())
      throw Error(ExitCode::data, doing(number),
                  str("its ", place->bytes, " stored bytes are more than its values can take, at most ",
                      codecs.most_encoded_bytes()),
                  damaged);
    if (codecs.is_plain() && place->bytes == into.size()) return place->file.read(into, place->offset);
    thread_local hdf5::Buffer input;
    const auto encoded = input.take(place->bytes);
    place->file.read(encoded, place->offset);
    codecs.decode(encoded, into, [&] { return doing(number); });
  }

  void will_read(std::int64_t number) const noexcept override {
    try {
      auto place = find(number);
      if (!place) return;
      place->file.will_read(place->offset, place->bytes);
      const std::lock_guard lock(mutex_);
      // Other ranks have decoded the requested chunks that are left. All arrays of a store share the limit.
      const auto arrays = static_cast<std::size_t>(std::max(1L, files_.use_count()));
      if (requested_.size() >= std::max<std::size_t>(4, 4 * most_requested / arrays)) requested_.clear();
      requested_.insert_or_assign(number, *std::move(place));
    } catch (const std::exception&) {  // read() meets the error again
    }
  }

  const std::string& codecs() const noexcept override { return metadata_.codecs->text(); }

  Stored stored(std::int64_t most) const override {
    Stored all{.checksum = metadata_checksum_};
    std::int64_t files = 1;
    std::vector<std::int64_t> grid;
    for (std::size_t d = 0; d < grid_.size(); ++d) {
      grid.push_back((grid_[d] + in_shard_[d] - 1) / in_shard_[d]);
      files = checked_product(files, grid.back(), "reading " + shown_, "its shape");
    }
    const auto some = std::min(files, std::max<std::int64_t>(2, most));
    for (std::int64_t i = 0; i < some; ++i) {
      // The last file, and others at equal distances before it.
      const auto number = i == some - 1 ? files - 1 : files / some * i + files % some * i / some;
      const auto file = files_->open(folder_ + metadata_.key(hdf5::chunk_coordinates(number, grid)));
      all.is_whole = all.is_whole && file;
      all.bytes += file ? file->size() : 0;
      const auto noted = file ? file->size() : missing;
      all.checksum = checksum_of(&noted, sizeof noted, all.checksum);
    }
    if (some < files)
      all.bytes = static_cast<std::uint64_t>(
          std::min(static_cast<double>(all.bytes) / static_cast<double>(some) * static_cast<double>(files), 0x1p62));
    return all;
  }

 private:
  /// Where the chunks of a shard lie: an offset and a size for each. Both are the largest number if the chunk is
  /// missing.
  using Index = std::vector<std::uint64_t>;
  /// A chunk in its file.
  struct Place {
    StoredFile file;
    std::uint64_t offset, bytes;
  };

  std::string doing(std::int64_t number) const {
    auto at = hdf5::chunk_coordinates(number, grid_);
    const auto text = listed(at, at.size(), [](auto each) { return std::to_string(each); });
    for (std::size_t d = 0; d < at.size(); ++d) at[d] /= in_shard_[d];
    return "reading " + shown_ + ", chunk (" + text + ") in " + metadata_.key(at);
  }

  std::optional<Place> take_requested(std::int64_t number) const {
    {
      const std::lock_guard lock(mutex_);
      if (auto requested = requested_.extract(number)) return std::move(requested.mapped());
    }
    return find(number);
  }

  /// Finds a chunk in its file; none if it is missing.
  std::optional<Place> find(std::int64_t number) const {
    auto at = hdf5::chunk_coordinates(number, grid_);
    std::size_t place = 0;
    for (std::size_t d = 0; d < at.size(); ++d) {
      place = place * static_cast<std::size_t>(in_shard_[d]) + static_cast<std::size_t>(at[d] % in_shard_[d]);
      at[d] /= in_shard_[d];
    }
    const auto key = folder_ + metadata_.key(at);
    auto file = files_->open(key);
    if (!file) return {};
    const auto size = file->size();
    if (metadata_.shard.empty()) return Place{*std::move(file), 0, size};
    const auto index = index_of(key, *file);
    const auto offset = (*index)[2 * place], bytes = (*index)[2 * place + 1];
    if (offset == missing && bytes == missing) return {};
    if (offset > size || bytes > size - offset)
      throw Error(ExitCode::data, doing(number), "it ends beyond the end of its shard", damaged);
    return Place{*std::move(file), offset, bytes};
  }

  std::shared_ptr<const Index> index_of(const std::string& key, const StoredFile& shard) const {
    const auto known_as = std::pair(key, shard.version());
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = indexes_.find(known_as); known != indexes_.end()) return known->second;
    }
    const auto doing = "reading the index of " + shown_ + ", shard " + key;
    const auto& codecs = *metadata_.index_codecs;
    const auto size = *codecs.encoded_bytes();
    if (size > shard.size())
      throw Error(ExitCode::data, doing, str("the shard has ", shard.size(), " bytes, fewer than its index"), damaged);
    std::vector<std::byte> encoded(size);
    shard.read(encoded, metadata_.index_is_at_end ? shard.size() - size : 0);
    auto index = std::make_shared<Index>(codecs.decoded_bytes() / sizeof(std::uint64_t));
    codecs.decode(encoded, std::as_writable_bytes(std::span(*index)), [&] { return doing; });
    const std::lock_guard lock(mutex_);
    if (indexes_.size() * size > most_index_bytes) indexes_.clear();
    indexes_.insert_or_assign(known_as, index);
    return index;
  }

  const std::shared_ptr<const StoreFiles> files_;
  const std::string folder_;
  const ArrayMetadata metadata_;
  const std::string shown_;
  const std::uint32_t metadata_checksum_;
  std::vector<std::int64_t> grid_;      ///< the number of chunks along each dimension
  std::vector<std::int64_t> in_shard_;  ///< the number of chunks of a shard along each dimension; 1 without shards
  mutable std::mutex mutex_;
  mutable std::map<std::pair<std::string, std::uint64_t>, std::shared_ptr<const Index>> indexes_;  ///< by key, version
  mutable std::map<std::int64_t, Place> requested_;
};

}  // namespace

std::shared_ptr<const hdf5::ForeignChunks> chunks_of(std::shared_ptr<const StoreFiles> files, std::string folder,
                                                     ArrayMetadata metadata, std::string shown,
                                                     const std::string& metadata_text) {
  return std::make_shared<Chunks>(std::move(files), std::move(folder), std::move(metadata), std::move(shown),
                                  metadata_text);
}

}  // namespace muster::detail::zarr
