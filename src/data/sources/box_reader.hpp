// Reads boxes of an array of any number of dimensions.
#pragma once

#include "base/file.hpp"
#include "data/sources/ahead.hpp"
#include "data/sources/stored_array.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// A box of an array, not empty and inside of it. Its first value goes to `into`.
struct Box {
  std::vector<std::int64_t> begin, size;
  std::byte* into = nullptr;
};

/// Thread-safe.
class BoxReader {
 public:
  explicit BoxReader(StoredArray array) : array_(std::move(array)) {}
  virtual ~BoxReader() = default;

  const StoredArray& array() const noexcept { return array_; }
  /// True if boxes with `last` values along the last dimension are read without decoding or converting other values.
  virtual bool reads_directly(std::int64_t last) const = 0;
  /// Reads boxes, as stored, into memory with these strides, in bytes.
  virtual void read(const File& bytes, std::span<const Box> boxes, std::span<const std::size_t> strides) = 0;
  /// Prepares to read these boxes. `how`: whether to request or to decode what they need.
  virtual void expect(const File& /*bytes*/, std::span<const Box> /*boxes*/, Ahead /*how*/) {}
  /// The array through which HDF5 reads the values; null if HDF5 does not read them.
  virtual LibraryArray* library() noexcept { return nullptr; }

 protected:
  StoredArray array_;
};

std::unique_ptr<BoxReader> make_box_reader(StoredArray array);

}  // namespace muster::detail::data
