// Reads boxes of an array of any number of dimensions.
#pragma once

#include "base/file.hpp"
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

/// Calls run(a, b, bytes) for each piece of a box that is in one piece in two arrays: `a` and `b` are its offsets from
/// the box's first value in either. Strides and offsets are in bytes; `value`: the bytes of a value.
template <class Run>
void each_run(std::span<const std::int64_t> size, std::span<const std::size_t> a, std::span<const std::size_t> b,
              std::size_t value, Run&& run) {
  auto outer = size.size(), bytes = value;
  for (; outer > 0 && a[outer - 1] == bytes && b[outer - 1] == bytes; --outer)
    bytes *= static_cast<std::size_t>(size[outer - 1]);
  std::vector<std::int64_t> at(outer, 0);
  std::size_t in_a = 0, in_b = 0;
  while (true) {
    run(in_a, in_b, bytes);
    auto d = outer;
    for (; d > 0; --d) {
      in_a += a[d - 1], in_b += b[d - 1];
      if (++at[d - 1] < size[d - 1]) break;
      in_a -= a[d - 1] * static_cast<std::size_t>(size[d - 1]);
      in_b -= b[d - 1] * static_cast<std::size_t>(size[d - 1]);
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

/// Thread-safe.
class BoxReader {
 public:
  explicit BoxReader(StoredArray array) : array_(std::move(array)) {}
  virtual ~BoxReader() = default;

  const StoredArray& array() const noexcept { return array_; }
  /// True if boxes with `last` values along the last dimension are read without decoding or converting others.
  virtual bool reads_directly(std::int64_t last) const = 0;
  /// Reads boxes, as stored, into memory with these strides, in bytes.
  virtual void read(const File& bytes, std::span<const Box> boxes, std::span<const std::size_t> strides) = 0;
  /// Prepares to read these boxes.
  virtual void expect(const File& /*bytes*/, std::span<const Box> /*boxes*/) {}
  /// Keeps all values in memory from the first read on, if HDF5 reads them.
  virtual void keep_in_memory() {}

 protected:
  StoredArray array_;
};

std::unique_ptr<BoxReader> make_box_reader(StoredArray array);

}  // namespace muster::detail::data
