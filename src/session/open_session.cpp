#include "session/open_session.hpp"

#include "base/log.hpp"
#include "muster/trainer.hpp"

#include <ATen/Parallel.h>

#include <exception>
#include <utility>

namespace muster::detail::session {

OpenSession::OpenSession(const run::ResolvedOptions& resolved, const run::RunFolder& run, const Communicator& workers,
                         const Communicator& control, at::Device device, BadSteps& bad_steps)
    : state_(resolved, run, workers, control, device, bad_steps), user_session_(state_), device_(device) {}

void OpenSession::open() {
  const auto& resolved = state_.resolved;
  at::set_num_threads(resolved.threads_per_worker);
  if (state_.late_ranks) state_.late_ranks->watch_intraop_threads();
  state_.workers.seed_generators();
  state_.resumer.resume();
  const std::shared_ptr<Backend> backend =
      resolved.backend ? resolved.backend->make_backend() : std::make_unique<Backend>();
  backend->on_start(user_session_);
  backend_ = backend;
  backend->on_training_start(user_session_);
  state_.outputs.observers.callbacks().begin_attempt(user_session_, state_.resumer.take_callback_states());
  state_.progress.start_clock();
}

void OpenSession::run(const std::function<void()>& work) {
  try {
    work();
  } catch (...) {
    const auto& end = *state_.attempt_end;
    if (!end.is_hidden_by(std::current_exception())) throw;
    log::warn("the attempt had ended, and then the training function threw: " + comm::current_outcome().text);
    end.throw_if_ended();
  }
  state_.throw_if_ended();
}

void OpenSession::close() {
  state_.attempt_end->forget();
  state_.outputs.observers.callbacks().forget_added();
  state_.resumer.confirm_start();
  state_.end_training();
  std::exchange(backend_, nullptr)->on_shutdown(user_session_);
  state_.outputs.observers.finish({});
}

void OpenSession::end(const std::optional<Error>& error) noexcept {
  state_.has_failed = true;
  state_.outputs.observers.callbacks().forget_added();
  if (const auto backend = std::exchange(backend_, nullptr)) try {
      backend->on_shutdown(user_session_);
    } catch (...) {
      log::warn("shutting down the backend: " + comm::current_outcome().text);
    }
  state_.outputs.wait_for_save_and_warn();
  state_.outputs.observers.finish(error);
}

}  // namespace muster::detail::session
