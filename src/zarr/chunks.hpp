// The chunks of an array of a Zarr store.
#pragma once

#include "hdf5/foreign_chunks.hpp"
#include "zarr/metadata.hpp"
#include "zarr/store_files.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::zarr {

class Chunks final : public hdf5::ForeignChunks {
 public:
  /// `folder`: of the array, empty or with a slash at its end. `metadata_text`: for the fingerprint.
  Chunks(std::shared_ptr<const StoreFiles> files, std::string folder, ArrayMetadata metadata, std::string shown,
         const std::string& metadata_text);

  void read(std::int64_t number, std::span<std::byte> into) const override;
  void will_read(std::int64_t number) const noexcept override;
  const std::string& codecs() const noexcept override { return metadata_.codecs->text(); }
  Stored stored(std::int64_t most) const override;

 private:
  /// Where the chunks of a shard lie: an offset and a size for each. Both are the largest number if it is missing.
  using Index = std::vector<std::uint64_t>;
  /// A chunk in its file.
  struct Place {
    StoredFile file;
    std::uint64_t offset, bytes;
  };

  /// None if the chunk is missing.
  std::optional<Place> find(std::int64_t number) const;
  std::shared_ptr<const Index> index_of(const std::string& key, const StoredFile& shard) const;
  std::string doing(std::int64_t number) const;

  const std::shared_ptr<const StoreFiles> files_;
  const std::string folder_;
  const ArrayMetadata metadata_;
  const std::string shown_;
  std::uint32_t metadata_checksum_ = 0;
  std::vector<std::int64_t> grid_;      ///< the number of chunks along each dimension
  std::vector<std::int64_t> in_shard_;  ///< of a shard; 1 if there are none
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::pair<std::uint64_t, std::shared_ptr<const Index>>> indexes_;  ///< with versions
  mutable std::size_t index_bytes_ = 0;
};

}  // namespace muster::detail::zarr
