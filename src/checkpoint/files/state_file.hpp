// state.h5: the tensors. HDF5 lays the file out in memory; then ranks write its bytes where they belong
// (state_writer.hpp), so no HDF5 call is collective and none touches a disk. Reading goes by the manifest's offsets
// (state_reader.hpp): HDF5 never parses what somebody else has written.
#pragma once

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

/// Bytes of a file, and where they belong.
struct Stretch {
  std::uint64_t offset = 0;
  std::vector<std::uint8_t> bytes = {};

  std::uint64_t end() const noexcept { return offset + bytes.size(); }
};

/// Where everything lies in a file.
struct Layout {
  std::vector<TensorEntry> tensors;
  std::uint64_t bytes = 0;              ///< of the file, whole blocks
  std::vector<Stretch> structure = {};  ///< what is no tensor's, in the order of the file; zeroes elsewhere
};

std::string pack(const Layout& layout);
Layout unpack_layout(std::string_view packed);

/// An Error (ExitCode::usage) for a tensor that has no dense values, or for names that cannot stand beside each other.
void check_storable(const Tensors& tensors);

/// The layout of a file with a dataset for each tensor, the parts of its name being groups. Tensors that share their
/// memory become one dataset with several names. Those named in `per_rank` have a row for each of so many ranks.
Layout lay_out(const Tensors& tensors, const std::set<std::string>& per_rank = {}, int ranks = 1);
/// Whether that would give this one.
bool fits(const Layout& layout, const Tensors& tensors, const std::set<std::string>& per_rank, int ranks);

/// An Error (ExitCode::usage) if these are not the tensors that the file was laid out for.
void check_layout(const Layout& layout, const Tensors& tensors);

/// The pieces of a file of that size that hold a byte of a tensor which is wanted, in their order.
std::vector<std::uint64_t> pieces_with(const std::vector<TensorEntry>& tensors, std::uint64_t file_bytes,
                                       const std::function<bool(const std::string&)>& wanted);

/// Which tensor lies where.
class Places {
 public:
  explicit Places(const std::vector<TensorEntry>& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.bytes > 0) sorted_.push_back(&tensor);
    std::ranges::sort(sorted_, {}, &TensorEntry::offset);
  }

  /// Calls segment(range, tensor) for each stretch of `range` in order: the tensor that lies there, or null.
  void each(Range range, auto&& segment) const {
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
  std::vector<const TensorEntry*> sorted_;  // those with bytes
};

}  // namespace muster::detail::checkpoint
