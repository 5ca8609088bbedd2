// state.h5 holds the tensors. HDF5 lays the file out in memory; then ranks write the bytes at their offsets
// (state_writer.hpp). So no HDF5 call is collective, and none touches a disk. Reading uses the offsets in the manifest
// (state_reader.hpp), so HDF5 never parses a file from elsewhere.
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

/// A range of bytes of a file, with their offset.
struct FileBytes {
  std::uint64_t offset = 0;
  std::vector<std::uint8_t> bytes = {};

  std::uint64_t end() const noexcept { return offset + bytes.size(); }
};

/// Where everything lies in a file.
struct Layout {
  std::vector<TensorEntry> tensors;
  std::uint64_t bytes = 0;                ///< size of the file, a multiple of the block size of direct writes
  std::vector<FileBytes> structure = {};  ///< HDF5's own bytes, in the order of the file; all other gaps are zero
};

std::string pack(const Layout& layout);
Layout unpack_layout(std::string_view packed);

/// Throws an Error (ExitCode::usage) for a tensor that cannot be stored: not dense, of a type that HDF5 does not have,
/// or with a name that conflicts with another.
MUSTER_INTERNAL_API void check_storable(const Tensors& tensors);

/// Returns the layout of a file with one dataset per tensor. The parts of a tensor's name become groups. Tensors that
/// share their memory become one dataset with several names. Tensors named in `per_rank` have one row for each of
/// `ranks` ranks.
MUSTER_INTERNAL_API Layout make_layout(const Tensors& tensors, const std::set<std::string>& per_rank = {},
                                       int ranks = 1);
/// True if make_layout() with these arguments would return this layout.
bool layout_fits(const Layout& layout, const Tensors& tensors, const std::set<std::string>& per_rank, int ranks);

/// Throws an Error (ExitCode::usage) if these are not the tensors that the file was laid out for.
void check_layout(const Layout& layout, const Tensors& tensors);

/// Returns the pieces of a file of `file_bytes` that hold bytes of wanted tensors, in ascending order.
std::vector<std::uint64_t> pieces_of_tensors(const std::vector<TensorEntry>& tensors, std::uint64_t file_bytes,
                                             const std::function<bool(const std::string&)>& wanted);

/// Finds the tensor at an offset of the file.
class TensorIndex {
 public:
  explicit TensorIndex(const std::vector<TensorEntry>& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.bytes > 0) sorted_.push_back(&tensor);
    std::ranges::sort(sorted_, {}, &TensorEntry::offset);
  }

  /// Splits `range` at the borders of tensors and calls segment(range, tensor) for each part in order; `tensor` is null
  /// if no tensor lies there.
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
  std::vector<const TensorEntry*> sorted_;  // tensors with bytes, by offset
};

}  // namespace muster::detail::checkpoint
