// Apart from SessionState, since c10d's header is heavy and few look into it.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>

namespace muster::detail::train {

/// What the backend has given the session.
struct ProcessGroups {
  /// A new one over the workers. Collective.
  std::function<c10::intrusive_ptr<c10d::ProcessGroup>()> make = {};
  /// The training function's own.
  c10::intrusive_ptr<c10d::ProcessGroup> own = {};
};

}  // namespace muster::detail::train
