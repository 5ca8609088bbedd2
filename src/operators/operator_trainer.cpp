#include "base/json.hpp"
#include "base/text.hpp"
#include "launch/settings.hpp"
#include "muster/error.hpp"
#include "operators/operator_run.hpp"

#include <torch/torch.h>

namespace muster {

using detail::operators::Call;
using detail::operators::OperatorWorker;

OperatorTrainerBase::OperatorTrainerBase(Launch& launch, std::function<std::unique_ptr<TrainingOperator>()> make,
                                         OperatorTrainerOptions options)
    : run_(std::make_unique<detail::operators::OperatorRun>(launch, make, options)) {}

OperatorTrainerBase::~OperatorTrainerBase() = default;

Json OperatorTrainerBase::train(const TrainOptions& options) {
  return run_->run_or_replay(
      Call::train, [&](OperatorWorker& worker) { worker.check(options); },
      [&](OperatorWorker& worker) { return worker.train(options); });
}

Json OperatorTrainerBase::validate(const ValidateOptions& options) {
  return run_->run_or_replay(
      Call::validate, [&](OperatorWorker& worker) { worker.check(options); },
      [&](OperatorWorker& worker) { return worker.validate(options); });
}

Json OperatorTrainerBase::apply_all_workers(const std::function<Json()>& function) {
  return detail::json_from_text(
      run_->run_on_all([&](OperatorWorker& worker) { return detail::json_text_lossy(worker.gather(function())); }));
}

Json OperatorTrainerBase::apply_operators(const std::function<Json(TrainingOperator&)>& function) {
  // The history holds results but no data, so a call that registers data must be repeated.
  if (const auto* const saved = run_->saved_call(); saved != nullptr && saved->registers_data)
    run_->run_on_all([&](OperatorWorker& worker) { return worker.register_again(function), std::string(); });
  return run_->run_or_replay(Call::apply_all_operators, {},
                             [&](OperatorWorker& worker) { return worker.apply(function); });
}

Result OperatorTrainerBase::run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step) {
  const auto has_validation = [](OperatorWorker& worker) {
    return std::string(worker.registry().validation.passes() != nullptr ? "yes" : "");
  };
  return run_->run_trial(num_iterations, [&](std::int64_t iteration) {
    if (step) return step(iteration);
    auto result = train({});
    if (!run_->run_on_all(has_validation).empty()) result.update(validate({}));
    return result;
  });
}

OperatorTrainerOptions OperatorTrainerBase::of_trial(OperatorTrainerOptions options, const Launch& launch,
                                                     const Config& settings) {
  options.config = detail::launch::override_defaults(options.config, settings, "choosing the settings of a trial");
  if (!options.num_workers.most()) options.num_workers = launch.size();
  return options;
}

void OperatorTrainerBase::update_scheduler(double metric) {
  run_->run_or_replay(
      Call::update_scheduler, [](OperatorWorker& worker) { worker.require_plateau_scheduler(); },
      [&](OperatorWorker& worker) { return worker.update_scheduler(metric); });
}

StateDict OperatorTrainerBase::state_dict() { return run_->state_dict(); }

void OperatorTrainerBase::load_state_dict(const StateDict& state) {
  run_->run_or_replay(
      Call::load_state_dict, [&](OperatorWorker& worker) { worker.check(state); },
      [&](OperatorWorker& worker) { return worker.restore(state); });
}

void OperatorTrainerBase::save(const std::filesystem::path& path) {
  // save() does not change the trainer, so it runs as the check: if it fails, the trainer stays open.
  run_->run_or_replay(
      Call::save, [&](OperatorWorker& worker) { worker.save(path); }, [](OperatorWorker&) { return Json(); });
}

void OperatorTrainerBase::load(const std::filesystem::path& path) {
  StateDict saved;
  run_->run_or_replay(
      Call::load, [&](OperatorWorker& worker) { saved = worker.read(path); },
      [&](OperatorWorker& worker) { return worker.restore(saved); });
}

void OperatorTrainerBase::shutdown(bool force) { run_->shutdown(force); }
TrainingOperator& OperatorTrainerBase::local_operator() { return run_->worker().training_operator(); }

std::shared_ptr<torch::nn::Module> OperatorTrainerBase::model_of(bool to_cpu, std::size_t number) {
  const auto& models = run_->worker().registry().models;
  if (number >= models.size())
    throw Error(ExitCode::usage, detail::str("asking for model ", number),
                detail::str("the operator has registered ", models.size()), "Numbers begin with 0");
  return to_cpu ? models[number]->clone(at::Device(at::kCPU)) : models[number];
}

void OperatorTrainerBase::refuse_type(std::size_t number) {
  throw Error(ExitCode::usage, detail::str("asking for model ", number), "it is of another type",
              "Name the type of the module, as in get_model<NetImpl>()");
}

}  // namespace muster
