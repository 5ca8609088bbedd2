// The metadata of groups and arrays of Zarr stores, of versions 2 and 3.
#pragma once

#include "muster/json.hpp"
#include "zarr/codec_chain.hpp"
#include "zarr/number_type.hpp"
#include "zarr/store_files.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::zarr {

/// The documents of a group or an array.
struct Node {
  bool is_array = false;
  Json document, attributes;
  std::string text;  ///< of both
};

/// The group or array in `folder`, which is empty or ends with a slash; none if it has no metadata. An array of
/// version 2 is described as version 3 does it. The copies in consolidated metadata are not read: they may be older.
/// Throws an Error if a document is damaged.
std::optional<Node> read_node(const StoreFiles& files, const std::string& folder, const std::string& doing);

struct ArrayMetadata {
  /// Throws an Error (ExitCode::data) that names what muster cannot read, or what is wrong.
  ArrayMetadata(const Node& node, const std::string& doing);

  /// The name of the file of a chunk, or of a shard if there are shards.
  std::string key(const std::vector<std::int64_t>& coordinates) const;

  NumberType type;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> chunk;         ///< the shape of a chunk, in a shard if there are shards
  std::vector<std::int64_t> shard;         ///< the shape of a shard; empty if each chunk has a file
  std::vector<std::string> dimensions;     ///< a name for each, perhaps empty; no elements if the array names none
  std::vector<std::byte> fill_value;       ///< of the values as they are decoded
  std::optional<CodecChain> codecs;        ///< none for a single value, which is not read
  std::optional<CodecChain> index_codecs;  ///< of a shard's index; of a known size
  bool index_is_at_end = true;
  Json attributes;  ///< with _FillValue, if the array has missing values

 private:
  void read(const Json& document, const std::string& doing);
  void read_codecs(const Json& codecs, const std::string& doing);
  void check_shapes(const std::string& doing) const;

  std::string key_prefix_, separator_;
};

}  // namespace muster::detail::zarr
