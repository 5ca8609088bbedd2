// How the values of a chunk are encoded, and how that is undone.
#pragma once

#include "hdf5/filter_pipeline.hpp"
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
  /// `array`: the metadata of version 2.
  static CodecChain of_version_2(const Json& array, const NumberType& type, std::vector<std::int64_t> chunk,
                                 const std::string& doing);

  /// Decodes a chunk into memory of its size. Throws an Error (ExitCode::data) if it is damaged. Thread-safe.
  void decode(std::span<const std::byte> encoded, std::span<std::byte> into, const std::string& doing) const;
  /// True if a chunk is stored as it is.
  bool is_plain() const noexcept { return steps_.empty(); }
  std::size_t decoded_bytes() const noexcept { return decoded_bytes_; }
  /// None if they depend on the values.
  const std::optional<std::size_t>& encoded_bytes() const noexcept { return bytes_; }
  /// An encoded chunk has at most so many bytes, about as many as its values.
  std::uint64_t most_encoded_bytes() const noexcept { return most_encoded_bytes_; }
  /// "delta, blosc lz4"; empty if the values are stored as they are.
  const std::string& text() const noexcept { return text_; }

 private:
  /// Fills `into` with what `encoded` decodes to. False if that is not exactly as much.
  using Undo = std::function<bool(std::span<const std::byte> encoded, std::span<std::byte> into)>;
  struct Step {
    std::string name;
    Undo undo;                         ///< none for a checksum, which is checked and removed
    std::optional<std::size_t> bytes;  ///< before the codec was applied; none if they depend on the values
    bool is_at_end = true;             ///< the place of the checksum
  };

  CodecChain(std::vector<std::int64_t> chunk, const NumberType& type, const std::string& doing);
  void add(const std::string& name, const Json& options);
  void add_step(const std::string& shown, Undo undo);
  void add_transpose(std::vector<std::int64_t> order);
  void add_filter(const std::string& name, const Json& options);
  void end_of_values(bool is_big_endian);
  [[noreturn]] void refuse(const std::string& fact, const std::string& remedy) const;

  std::string doing_, text_;
  std::vector<Step> steps_;
  std::size_t decoded_bytes_ = 0;
  // While codecs are added: what the next one is applied to.
  std::vector<std::int64_t> shape_;
  NumberType type_;
  std::optional<std::size_t> bytes_;  ///< none after a codec that compresses
  bool holds_values_ = true;          ///< no codec has made bytes of them
  std::uint64_t most_encoded_bytes_ = 0;
};

}  // namespace muster::detail::zarr
