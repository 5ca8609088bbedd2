#include "session/callback_end.hpp"

#include "base/log.hpp"

#include <string>

namespace muster::detail::session {

void CallbackEnd::check() {
  if (!has_ended_) {
    has_ended_ = workers_.control.all_reduce(std::int64_t{outputs_.callbacks.should_stop()}, ReduceOp::max) != 0;
    if (!has_ended_) return;
    if (workers_.is_first())
      log::info("training ends after report " + std::to_string(progress_.training_iteration) +
                ", as a callback has asked");
  }
  if (throws_) throw TrainingEndedByCallback();
}

}  // namespace muster::detail::session
