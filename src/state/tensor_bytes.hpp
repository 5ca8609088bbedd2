#pragma once

#include "base/export.hpp"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <span>

namespace muster::detail::state {

/// Returns the size in bytes of a tensor of this type and shape; none if no tensor in state.h5 can have that shape: a
/// size is negative, there are more than 32 dimensions, or the number of bytes does not fit an int64.
MUSTER_INTERNAL_API std::optional<std::uint64_t> tensor_bytes(at::ScalarType type, std::span<const std::int64_t> shape);

}  // namespace muster::detail::state
