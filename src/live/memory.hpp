// The memory for the values of samples: a column for each field and parameter.
#pragma once

#include "live/sender/ring.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::live {

/// One column of all samples in memory.
struct LiveColumn {
  std::string name;
  int type = MUSTER_LIVE_FLOAT64;
  std::vector<std::int64_t> shape = {};
  std::int64_t bytes = 8;     ///< of a sample
  std::byte* data = nullptr;  ///< [samples in memory] of `bytes` each

  /// True if samples have the same column.
  bool operator==(const LiveColumn& other) const {
    return name == other.name && type == other.type && shape == other.shape;
  }
};

/// The columns of samples with this layout, without memory.
std::vector<LiveColumn> columns_of(const live_layout& layout);
/// The bytes of a sample in them.
std::int64_t sample_bytes(const std::vector<LiveColumn>& columns);
/// Gives the columns memory for `capacity` samples, and returns it; null if it cannot be mapped.
std::shared_ptr<std::byte> make_memory(std::vector<LiveColumn>& columns, std::int64_t capacity);
/// Copies a rank's block of a sample into the slot, with the parameters.
void copy_block(const live_layout& layout, const char* block, const std::vector<LiveColumn>& columns,
                std::int64_t slot);

/// True if a ring that came from another process, of so many bytes, has its places and blocks inside of them.
bool is_sound(const live_ring& ring, std::int64_t bytes, int trainers);

/// Maps a file, or new memory if `file` is -1. Null if there is none.
template <class T>
std::shared_ptr<T> map_file(std::int64_t bytes, int file);
extern template std::shared_ptr<std::byte> map_file(std::int64_t, int);
extern template std::shared_ptr<live_ring> map_file(std::int64_t, int);

}  // namespace muster::detail::live
