// How the values of a chunk are encoded, and how that is undone.
#pragma once

#include "muster/json.hpp"
#include "zarr/number_type.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::zarr {

/// The codecs of an array, in the order in which they were applied. At most one of them compresses.
class CodecChain {
 public:
  /// `codecs`: as version 3 lists them, without sharding. `chunk`: the shape of a chunk. Throws an Error that names the
  /// codec if it is not known here, and its package if muster was built without it.
  CodecChain(const Json& codecs, const NumberType& type, std::vector<std::int64_t> chunk, const std::string& doing);

  /// Decodes a chunk into memory of its size. Throws an Error (ExitCode::data) if it is damaged. `doing` returns
  /// the begin of the Error's text. Thread-safe.
  void decode(std::span<const std::byte> encoded, std::span<std::byte> into,
              const std::function<std::string()>& doing) const;
  /// True if a chunk is stored as it is.
  bool is_plain() const noexcept { return steps_.empty(); }
  std::size_t decoded_bytes() const noexcept { return decoded_bytes_; }
  /// The bytes of an encoded chunk; none if they depend on the values.
  const std::optional<std::size_t>& encoded_bytes() const noexcept { return encoded_bytes_; }
  /// The most bytes that an encoded chunk can have: somewhat more than its values.
  std::uint64_t most_encoded_bytes() const noexcept { return most_encoded_bytes_; }
  /// "delta, blosc lz4"; empty if the values are stored as they are.
  const std::string& text() const noexcept { return text_; }

 private:
  class Builder;
  /// Decodes `encoded` into `into`. False if the result does not have exactly the size of `into`.
  using Undo = std::function<bool(std::span<const std::byte> encoded, std::span<std::byte> into)>;
  struct Step {
    std::string name;
    Undo undo;                         ///< none for a checksum, which is checked and removed
    std::optional<std::size_t> bytes;  ///< before the codec was applied; none if they depend on the values
    bool is_at_end = true;             ///< of a checksum: it follows the bytes
  };

  std::vector<Step> steps_;
  std::string text_;
  std::size_t decoded_bytes_ = 0;
  std::optional<std::size_t> encoded_bytes_;
  std::uint64_t most_encoded_bytes_ = 0;
};

}  // namespace muster::detail::zarr
