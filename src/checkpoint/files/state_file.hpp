// state.h5 holds the tensors. One rank lets HDF5 lay the file out in memory; then the ranks write the bytes to their
// offsets without HDF5 (state_writer.hpp). So no HDF5 call is collective or touches a disk. Reading uses the offsets in
// the manifest (state_reader.hpp), so HDF5 never parses a file from elsewhere.
#pragma once

#include "base/export.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

using Tensors = std::map<std::string, at::Tensor>;

/// Consecutive bytes of a file, and their offset.
struct FileBytes {
  std::uint64_t offset = 0;
  std::vector<std::uint8_t> bytes = {};

  std::uint64_t end() const noexcept { return offset + bytes.size(); }
};

/// Where the tensors and HDF5's own bytes lie in a file.
struct Layout {
  std::vector<TensorEntry> tensors;
  std::uint64_t bytes = 0;  ///< size of the file; a multiple of the block size of direct writes
  /// HDF5's own bytes, in the order of the file; all other bytes outside of tensors are zero
  std::vector<FileBytes> structure = {};
};

std::string pack(const Layout& layout);
Layout unpack_layout(std::string_view packed);

/// Throws an Error (ExitCode::usage) for a tensor that cannot be stored: not dense, of a type that HDF5 does not have,
/// with too many dimensions, or with a name that is invalid, or cannot be in one file with another tensor's name.
MUSTER_INTERNAL_API void check_storable(const Tensors& tensors);

/// Returns the layout of a file with one dataset per tensor; the parts of a tensor's name become groups. Replicated
/// tensors with the same values in the same memory become one dataset with several names. Each tensor named in
/// `per_rank` gets one row for each of `ranks` ranks.
MUSTER_INTERNAL_API Layout make_layout(const Tensors& tensors, const std::set<std::string>& per_rank = {},
                                       int ranks = 1);
/// True if make_layout() with these arguments would return this layout.
bool layout_fits(const Layout& layout, const Tensors& tensors, const std::set<std::string>& per_rank, int ranks);

/// Throws an Error (ExitCode::usage) if the layout was made for tensors with other names, shapes or types.
void check_layout(const Layout& layout, const Tensors& tensors);

/// Returns the pieces of a file of `file_bytes` that hold bytes of tensors for which `wanted` returns true, in
/// ascending order.
std::vector<std::uint64_t> pieces_of_tensors(const std::vector<TensorEntry>& tensors, std::uint64_t file_bytes,
                                             const std::function<bool(const std::string&)>& wanted);

/// Finds the tensors that lie in a range of the file.
class TensorIndex {
 public:
  explicit TensorIndex(const std::vector<TensorEntry>& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.bytes > 0) sorted_.push_back(&tensor);
    std::ranges::sort(sorted_, {}, &TensorEntry::offset);
  }

  /// Splits `range` where tensors begin and end, and calls segment(range, tensor) for each part in order. `tensor` is
  /// null for a part that belongs to no tensor.
  void for_each_segment(Range range, auto&& segment) const {
    const TensorEntry* const none = nullptr;
    auto at = std::ranges::upper_bound(sorted_, range.begin, {},
                                       [](const TensorEntry* tensor) { return tensor->offset + tensor->bytes; });
    for (auto position = range.begin; position < range.end;) {
      if (at == sorted_.end() || (*at)->offset >= range.end) return segment(Range{position, range.end}, none);
      if (position < (*at)->offset) segment(Range{position, (*at)->offset}, none);
      position = std::max(position, (*at)->offset);
      const auto end = std::min(range.end, (*at)->offset + (*at)->bytes);
      segment(Range{position, end}, *at);
      position = end;
      ++at;
    }
  }

 private:
  std::vector<const TensorEntry*> sorted_;  // tensors with bytes, sorted by offset
};

}  // namespace muster::detail::checkpoint
