// A torch process group from an MPI communicator, on its own: c10d code written elsewhere runs over it. No port is
// opened. Users of the returned pointer include <torch/csrc/distributed/c10d/ProcessGroup.hpp>.
#pragma once

#include <muster/communicator.hpp>

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstddef>
#include <optional>

namespace c10d {
class ProcessGroup;
}

namespace muster {

struct ProcessGroupOptions {
  /// The limit of every collective; the launch's unless given.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Elements in one MPI call at the most.
  std::size_t chunk = std::size_t{1} << 30;
};

/// A process group over a duplicate of `communicator`, rank for rank. Collective. Its operations are started and waited
/// for on one thread at a time, in the same order on all ranks. A CPU tensor of any dense type may be moved; reductions
/// take booleans, integers, floating-point and complex numbers. Anything that cannot be done is an Error that says so.
c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const Communicator& communicator,
                                                          const ProcessGroupOptions& options = {});

}  // namespace muster
