// One worker, with what is needed to choose its samples.
#pragma once

#include <muster/detail/export.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace muster {

class Session;

namespace detail::data {

class PassPositions;

struct Worker {
  int rank = 0;
  int world = 1;
  int full_worker_count = 0;       ///< what `world` would be if no rank of the job were missing; 0: as `world`
  std::uint64_t seed = 0;          ///< the run's seed
  c10::Device device = c10::kCPU;  ///< the batches' device
  std::shared_ptr<PassPositions>
      pass_positions;  ///< where a loader counts the batches it hands out, and saves its position
};

/// Returns the session's worker; the session defines it. An Error with virtual workers, which loaders do not support.
MUSTER_API Worker worker_of(const Session& session);

}  // namespace detail::data
}  // namespace muster
