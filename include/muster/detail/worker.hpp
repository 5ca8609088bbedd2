// One rank among those that train together, as far as choosing its samples needs it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace muster {

class Session;

namespace detail::data {

class Cursors;

struct Worker {
  int rank = 0;
  int world = 1;
  int full = 0;                      ///< the ranks of the job when none is missing; 0: `world`
  std::uint64_t seed = 0;            ///< the run's
  c10::Device device = c10::kCPU;    ///< where batches go
  std::shared_ptr<Cursors> cursors;  ///< what a loader hands out counts there, and there its position is saved
};

/// That of the session, which defines it. An Error with virtual workers, which a loader knows nothing of.
Worker worker_of(const Session& session);

}  // namespace detail::data
}  // namespace muster
