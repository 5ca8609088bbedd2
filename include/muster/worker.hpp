// One rank among those that train together, as far as dealing out samples needs it. Session::worker() gives it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace muster {

namespace detail::data {
class Passes;
}

struct Worker {
  int rank = 0;
  int world = 1;
  /// Of the run: the same on all workers.
  std::uint64_t seed = 0;
  /// Where batches go.
  c10::Device device = c10::kCPU;
  /// The session's passes over data: what a loader deals out counts there and is weighed, and its position is saved
  /// with the session's. May be null.
  std::shared_ptr<detail::data::Passes> passes = {};
};

}  // namespace muster
