// The filters of a chunked dataset, undone without HDF5 and its lock.
#pragma once

#include "base/export.hpp"
#include "base/pages.hpp"
#include "hdf5/filters.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace muster::detail::hdf5 {

/// Memory that grows when it must and is not initialised: pages that nobody writes to take no space.
class MUSTER_INTERNAL_API Buffer {
 public:
  /// Returns memory of this size. If the memory must grow, its content is lost.
  std::span<std::byte> take(std::size_t bytes);

 private:
  std::unique_ptr<std::byte[]> memory_;  ///< small memory; larger memory is in `pages_`
  Pages pages_;
  std::size_t capacity_ = 0;
};

class MUSTER_INTERNAL_API FilterPipeline {
 public:
  /// What decode() needs beside its input and output. Each thread has its own.
  using Workspace = std::array<Buffer, 2>;

  /// A pipeline without filters.
  FilterPipeline() = default;
  /// `filters`: in the order in which they were applied when the chunks were written.
  explicit FilterPipeline(std::vector<Filter> filters);

  /// True if all filters are known here and at most one of them compresses. Otherwise HDF5 must read the dataset.
  bool decodes() const noexcept { return decodes_; }
  /// True if a chunk with this filter mask is stored as it is. Bit i of a mask is set if filter i was left out.
  bool is_plain(std::uint32_t mask) const noexcept;
  /// Decodes a chunk into `into`, which has the size of the whole chunk. Throws an Error (ExitCode::data) if its
  /// checksum is wrong or if it decodes to another size. `doing`: "reading FILE:/x, chunk (0, 3)". Thread-safe.
  void decode(std::span<const std::byte> stored, std::uint32_t mask, std::span<std::byte> into, Workspace& workspace,
              std::string_view doing) const;

 private:
  std::vector<Filter> filters_;
  bool decodes_ = true;
};

}  // namespace muster::detail::hdf5
