#include "session/callback_end.hpp"

#include "base/log.hpp"
#include "comm/on_ranks.hpp"

#include <algorithm>

namespace muster::detail::session {

void CallbackEnd::check() {
  if (!has_ended_) {
    const auto of_workers =
        comm::run_on_all(workers_.control, [&] { return outputs_.observers.callbacks().should_stop(); });
    has_ended_ = std::ranges::find(of_workers, true) != of_workers.end();
    if (!has_ended_) return;
    if (workers_.is_first())
      log::info(str("training ends after report ", progress_.training_iteration, ", as a callback has asked"));
  }
  if (throws_) attempt_end_.end_with(TrainingEndedByCallback());
}

}  // namespace muster::detail::session
