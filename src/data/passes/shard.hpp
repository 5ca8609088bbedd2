// A worker's view of one dataset, and the worker's position in it.
#pragma once

#include "data/passes/pass_positions.hpp"

#include "muster/communicator.hpp"

#include <c10/core/Device.h>

#include <optional>
#include <utility>

namespace muster::detail::data {

/// One per dataset and session, shared by every DatasetShard and BatchRange over it.
struct ShardState : PassPosition {
  ShardState(PassPositionOptions options, Dataset of, at::Device where = at::kCPU,
             std::optional<Communicator> among = {})
      : PassPosition(std::move(options)), dataset(std::move(of)), device(where), workers(std::move(among)) {}

  Dataset dataset;
  at::Device device;
  /// For a split stream or a source that draws: the workers, to agree on the steps. None for other datasets, and in
  /// unit tests.
  std::optional<Communicator> workers;
};

}  // namespace muster::detail::data
