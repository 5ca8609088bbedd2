// One rank among those that train together, as far as dealing out samples needs it. Session::worker() gives it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace muster {

namespace data {
struct StepWeight;
}

struct Worker {
  int rank = 0;
  int world = 1;
  /// Of the run: the same on all workers.
  std::uint64_t seed = 0;
  /// Where batches go.
  c10::Device device = c10::kCPU;
  /// How much this worker's gradient counts in a step, for the models that the session has prepared; may be null.
  std::shared_ptr<data::StepWeight> weight = {};
};

}  // namespace muster
