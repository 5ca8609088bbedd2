#include "operators/operator_run.hpp"

#include <utility>

namespace muster {

OperatorTrainerBase::OperatorTrainerBase(Launch& launch, std::function<std::unique_ptr<TrainingOperator>()> make,
                                         OperatorTrainerOptions options)
    : run_(std::make_unique<detail::operators::OperatorRun>(launch, make, std::move(options))) {}

OperatorTrainerBase::~OperatorTrainerBase() = default;

Json OperatorTrainerBase::train(const TrainOptions& options) { return run_->train(options); }
Json OperatorTrainerBase::validate(const ValidateOptions& options) { return run_->validate(options); }
Json OperatorTrainerBase::apply_all_workers(const std::function<Json()>& function) { return run_->apply(function); }
Json OperatorTrainerBase::apply_operators(const std::function<Json(TrainingOperator&)>& function) {
  return run_->apply(function);
}
Result OperatorTrainerBase::run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step) {
  return run_->run_trial(num_iterations, step);
}

OperatorTrainerOptions OperatorTrainerBase::of_trial(OperatorTrainerOptions options, const Launch& launch,
                                                     const Config& settings) {
  options.config = detail::launch::override_defaults(options.config, settings, "choosing the settings of a trial");
  if (!options.num_workers.most()) options.num_workers = launch.size();
  return options;
}

void OperatorTrainerBase::update_scheduler(double metric) { run_->update_scheduler(metric); }
StateDict OperatorTrainerBase::state_dict() { return run_->state_dict(); }
void OperatorTrainerBase::load_state_dict(const StateDict& state) { run_->load_state_dict(state); }
void OperatorTrainerBase::save(const std::filesystem::path& path) { run_->save(path); }
void OperatorTrainerBase::load(const std::filesystem::path& path) { run_->load(path); }
void OperatorTrainerBase::shutdown(bool force) { run_->shutdown(force); }
TrainingOperator& OperatorTrainerBase::local_operator() { return run_->local_operator(); }

std::shared_ptr<torch::nn::Module> OperatorTrainerBase::model_of(bool to_cpu, std::size_t number) {
  const auto& models = detail::operators::OperatorRegistry::of(run_->local_operator()).models;
  if (number >= models.size())
    throw Error(ExitCode::usage, "asking for model " + std::to_string(number),
                "the operator has registered " + std::to_string(models.size()), "Numbers begin with 0");
  return to_cpu ? models[number]->clone(at::Device(at::kCPU)) : models[number];
}

void OperatorTrainerBase::refuse_type(std::size_t number) {
  throw Error(ExitCode::usage, "asking for model " + std::to_string(number), "it is of another type",
              "Name the type of the module, as in get_model<NetImpl>()");
}

}  // namespace muster
