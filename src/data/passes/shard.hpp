// A worker's view of one dataset, and where it stands in it.
#pragma once

#include "data/passes/cursors.hpp"

#include <c10/core/Device.h>

#include <utility>

namespace muster::detail::data {

/// One per dataset and session, shared by every DatasetShard and BatchRange over it.
struct ShardState : Cursor {
  ShardState(CursorOptions options, Dataset of, at::Device where = at::kCPU)
      : Cursor(std::move(options)), dataset(std::move(of)), device(where) {}

  Dataset dataset;
  at::Device device;
};

}  // namespace muster::detail::data
