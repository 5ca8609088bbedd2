#include "observe/observers.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "observe/history.hpp"
#include "observe/progress_line.hpp"
#include "observe/status_file.hpp"
#include "observe/tensorboard.hpp"

namespace muster::detail::observe {

Observers::Observers(bool first_worker, const ObservedRun& run, const RunConfig& config) {
  if (first_worker) {
    auto history = std::make_unique<History>(run.folder);
    // With validations, status.json does not hold the best value: a validation may change a row's score after training,
    // when nobody writes status.json any more.
    auto status = std::make_unique<StatusFile>(run.folder, run.world_size, config.checkpoint_config,
                                               run.validates ? nullptr : history.get());
    observers_.push_back(std::move(history));
    observers_.push_back(std::move(status));
    observers_.push_back(std::make_unique<ProgressLine>(run.progress, run.first_epoch));
    if (config.tensorboard) observers_.push_back(make_tensorboard(run.folder, run.settings));
  }
  add_callbacks(config.callbacks);
}

void require_libraries(const RunConfig& config) {
  if (config.tensorboard) require_tensorboard();
}

std::function<void(std::int64_t, const Json&)> rows_after_training(const std::filesystem::path& folder,
                                                                   const RunConfig& config, const Json& settings) {
  const auto history = std::make_shared<History>(History::load(folder));
  std::shared_ptr<Observer> tensorboard;
  if (config.tensorboard) {
    tensorboard = make_tensorboard(folder, settings);
    AttemptStart after_all;
    for (const auto& row : History::read(folder)) {
      after_all.training_iteration = row.value("training_iteration", std::int64_t{0});
      after_all.global_step = row.value("global_step", std::int64_t{0});
    }
    tensorboard->start(after_all);
  }
  return [history, tensorboard](std::int64_t iteration, const Json& fields) {
    if (history->add_validation(iteration, fields) && tensorboard) tensorboard->validated(iteration, fields);
  };
}

Observers::Observers(std::vector<std::unique_ptr<Observer>> observers) : observers_(std::move(observers)) {
  add_callbacks({});
}

void Observers::add_callbacks(std::vector<std::shared_ptr<Callback>> callbacks) {
  auto made = std::make_unique<Callbacks>(std::move(callbacks));
  callbacks_ = made.get();
  observers_.push_back(std::move(made));
}

void Observers::start(const Communicator& workers, const AttemptStart& start) {
  comm::run_on_root(workers, [&] { tell(&Observer::start, start); });
  if (workers.rank() != 0) tell(&Observer::start, start);
}

void Observers::finish(const std::optional<Error>& failure) noexcept {
  constexpr const char* what = "the end of training";
  failure ? tell_and_log_errors(what, &Observer::failure, *failure) : tell_and_log_errors(what, &Observer::end);
}

void Observers::log_error(const char* what) noexcept {
  log::warn(str("telling the observers of the run of ", what, ": ", comm::current_outcome().text));
}

}  // namespace muster::detail::observe
