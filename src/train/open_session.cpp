#include "train/open_session.hpp"

#include "base/log.hpp"
#include "muster/trainer.hpp"

#include <ATen/Parallel.h>

#include <utility>

namespace muster::detail::train {

OpenSession::OpenSession(const Plan& plan, const RunFolder& run, const Communicator& workers,
                         const Communicator& control, at::Device device, BadSteps& bad_steps)
    : state_(plan, run, workers, control, device, bad_steps), view_(state_), device_(device) {}

void OpenSession::open() {
  const auto& plan = state_.plan;
  at::set_num_threads(plan.threads);
  state_.workers.seed_generators();
  state_.resume();
  const std::shared_ptr<Backend> backend = plan.backend ? plan.backend->make_backend() : std::make_unique<Backend>();
  backend->on_start(view_);
  state_.backend = backend;
  backend->on_training_start(view_);
  state_.outputs.callbacks.start(view_, std::exchange(state_.start.callbacks, {}));
  state_.counters.start_clock();
}

void OpenSession::close() {
  state_.outputs.callbacks.forget_added();
  state_.take_up();
  state_.end_training();
  std::exchange(state_.backend, nullptr)->on_shutdown(view_);
  state_.outputs.sinks.finish({});
  state_.outputs.callbacks.finish({});
}

void OpenSession::leave(const std::optional<Error>& error) noexcept {
  state_.failed = true;
  state_.outputs.callbacks.forget_added();
  if (const auto backend = std::exchange(state_.backend, nullptr)) try {
      backend->on_shutdown(view_);
    } catch (...) {
      log::warn("shutting down the backend: " + comm::caught().text);
    }
  state_.outputs.settle_quietly();
  state_.outputs.sinks.finish(error);
  state_.outputs.callbacks.finish(error);
}

}  // namespace muster::detail::train
