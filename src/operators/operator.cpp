#include "muster/operator.hpp"

#include "base/log.hpp"
#include "data/sources/share_chunks.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "operators/loss.hpp"
#include "operators/registry.hpp"
#include "optim/step_count.hpp"
#include "run/same_data.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace muster {
namespace detail::operators {
namespace {

/// Returns a name for an object: "model", or "model_0" if there are several.
std::string name_of(const char* kind, std::size_t number, std::size_t all) {
  return all == 1 ? kind : str(kind, "_", number);
}

std::string in_quotes(const std::string& name) { return '"' + name + '"'; }

/// Splits a batch of `passes` into features and target. Logs once which columns these are.
std::pair<std::vector<at::Tensor>, at::Tensor> split(const char* doing, OperatorRegistry& registry, Passes* passes,
                                                     const Batch& batch) {
  std::vector<at::Tensor> features;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : batch) {
    features.push_back(tensor);
    names.push_back(in_quotes(name));
  }
  if (features.size() < 2)
    throw Error(ExitCode::user_error, doing, str("a batch has ", features.size(), " columns"),
                "Give features and, as the last column, the target; or override the method");
  if (const auto source = passes != nullptr ? passes->without_column_order() : std::nullopt)
    throw Error(ExitCode::usage, doing,
                "the columns " + data::joined(names) + " of " + *source +
                    " come in the order of their names, so the last one need not be the target",
                "Name them in register_data(): {dataset, options, {.features = {...}, .target = \"...\"}}");
  auto target = std::move(features.back());
  features.pop_back();
  const auto target_name = names.back();
  names.pop_back();
  const auto told = "the target is the column " + target_name + ", the features are " + data::joined(names);
  if (std::exchange(registry.logged_columns, told) != told && registry.session.world_rank() == 0) log::info(told);
  return {std::move(features), std::move(target)};
}

/// Returns the columns of a batch, with the target last. Empty if a batch has all columns of the dataset in their
/// order.
std::vector<std::string> column_names(const BatchColumns& columns, data::Source& source) {
  const std::string doing = "choosing the columns of " + source.shown();
  auto names = columns.features;
  if (names.empty() && columns.target.empty()) return {};
  if (!columns.target.empty()) names.push_back(columns.target);
  auto sorted = names;
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
    throw Error(ExitCode::usage, doing, "column " + in_quotes(*twice) + " is named twice", "Name each once");
  if (source.is_stream()) {
    if (columns.features.empty() || columns.target.empty())
      throw Error(ExitCode::usage, doing, "a stream's columns are not known before it is read",
                  "Name the features and the target");
    return names;
  }
  std::vector<std::string> others;
  for (const auto& name : names) data::column_of(source, name, doing);
  for (const auto& column : source.schema())
    if (std::ranges::find(names, column.name) == names.end()) others.push_back(column.name);
  if (columns.target.empty()) {
    if (others.size() != 1)
      throw Error(ExitCode::usage, doing,
                  others.empty() ? "all columns are features" : "any of " + data::joined(others) + " may be the target",
                  "Name the target");
    names.push_back(others.front());
  } else if (columns.features.empty()) {
    if (others.size() > 1 && !source.has_column_order())
      throw Error(ExitCode::usage, doing,
                  "the columns " + data::joined(others) + " have no order but that of their names",
                  "Name the features in the order in which the model takes them");
    names.insert(names.begin(), others.begin(), others.end());
  }
  return names;
}

void require_one_of_each(const OperatorRegistry& registry, const char* doing, const char* method) {
  const auto remedy = str("Override ", method);
  if (registry.models.empty())
    throw Error(ExitCode::user_error, doing, "the operator has no model",
                str("Call register_training() in its setup(), or ", "override ", method));
  if (registry.models.size() > 1 || registry.optimizers.size() > 1)
    throw Error(ExitCode::user_error, doing,
                str("it has ", registry.models.size(), " models and ", registry.optimizers.size(),
                    " optimizers, and the default method takes one"),
                remedy);
  if (!registry.criterion) throw Error(ExitCode::user_error, doing, "no criterion was registered", remedy);
}

}  // namespace

OperatorRegistry::OperatorRegistry(session::SessionState& state_, Session& session_,
                                   const OperatorTrainerOptions& options_, Config config_)
    : state(state_),
      session(session_),
      options(options_),
      config(std::move(config_)),
      scaler(new GradScaler(session.grad_scaler({.enabled = options.use_fp16 && session.get_device().is_cuda()}))),
      train(state) {}

StateEntries OperatorRegistry::state_entries(TrainingOperator& owner) {
  StateEntries all;
  const auto add = [&](const char* kind, const auto& objects, auto&& entry) {
    for (std::size_t i = 0; i < objects.size(); ++i)
      all.emplace_back(name_of(kind, i, objects.size()), entry(objects[i]));
  };
  const auto object = [](const auto& pointer) { return StateEntry(*pointer); };
  add("model", models, [](const auto& module) { return StateEntry(module); });
  add("optimizer", optimizers, object);
  add("scheduler", schedulers, object);
  add("plateau_scheduler", plateaus, object);
  if (scaler->is_enabled()) all.emplace_back("scaler", *scaler);
  all.emplace_back("operator", StateEntry([&owner] { return owner.state_dict(); },
                                          [&owner](const StateDict& saved) { owner.load_state_dict(saved); }));
  all.emplace_back(
      "progress",
      StateEntry(
          [this, &owner] {
            return StateDict{.values = {{"epochs", train.epoch_count()}, {"global_step", owner.global_step}}};
          },
          [this, &owner](const StateDict& saved) {
            train.set_epoch_count(saved.values.at("epochs"));
            owner.global_step = saved.values.at("global_step");
          }));
  return all;
}

const Session& session_of(const OperatorRegistry& parts) { return parts.session; }

void refuse_divided_loader() {
  throw Error(ExitCode::usage, "registering data",
              "add_dist_sampler is false, and a loader of prepare_data_loader() divides the samples among the workers",
              "Give register_data() the dataset itself, or leave add_dist_sampler true");
}

void refuse_loader() {
  throw Error(ExitCode::usage, "registering data", "a loader of prepare_data_loader() was given twice, or is null",
              "Give training and validation a loader each");
}

void refuse_features(std::size_t number) {
  throw Error(ExitCode::user_error, "calling the model's forward()",
              str("it does not take ", number, " features and return a tensor"),
              "Override train_batch() and validate_batch()");
}

}  // namespace detail::operators

using detail::operators::OperatorRegistry;

OperatorLoader::OperatorLoader(Dataset dataset, BatchOptions options, BatchColumns columns)
    : make_([dataset, options, columns](OperatorRegistry& registry, const detail::operators::PassesOptions& of) {
        const std::string name = of.training ? "train" : "validation";
        auto workers = registry.state.workers;
        auto& data = registry.state.data;
        const auto& source = detail::data::source_of(dataset);
        detail::run::require_same_data(workers.control, workers.size(), {{name, source->fingerprint()}});
        detail::data::share_chunks(workers.control, {&source, 1});
        auto names = detail::operators::column_names(columns, *source);
        data.datasets.insert_or_assign(name, dataset);
        data.shards.erase(name);
        auto given = options;
        given.training = of.training;
        // A dataset that each worker reads in whole is split, too, but among one worker: only a split dataset has a
        // position that can be saved. A stream has none in any case, so it is not split then.
        data.config.split_all = of.split || !source->is_stream();
        if (!of.split && *data.config.split_all) {
          if (const auto global = given.global_batch_size.value_or(0); global > 0) {
            given.batch_size = (global - 1) / workers.size() + 1;
            given.global_batch_size.reset();
          }
          workers.share = {};
          workers.full_worker_count = 0;
        }
        return detail::operators::passes_over(DatasetShard(data.shard(name, workers)), given, source, std::move(names));
      }) {}

TrainingOperator::TrainingOperator() = default;
TrainingOperator::~TrainingOperator() = default;

OperatorRegistry& TrainingOperator::registry() const {
  if (!registry_)
    throw Error(ExitCode::user_error, "using an operator", "it belongs to no trainer yet",
                "Use it in setup() or later, not in the constructor");
  return *registry_;
}

namespace {

/// Adds the results of a batch, weighted by their own num_samples; without it, by `samples`, which is 0 for an empty
/// batch.
void add_results(AverageMeterCollection& meters, const Metrics& results, std::int64_t samples) {
  meters.update(results, results.contains("num_samples") ? std::nullopt : std::optional(samples));
}

}  // namespace

Metrics TrainingOperator::train_epoch(OperatorBatches& batches, const EpochInfo& info) {
  auto& registry = this->registry();
  for (const auto& model : registry.models) model->train();
  const auto step_schedulers = [&](SchedulerStepFreq moment) {
    if (scheduler_step_freq() != moment) return;
    for (const auto& scheduler : registry.schedulers) scheduler->step();
  };
  AverageMeterCollection meters;
  BatchInfo batch_info{info};
  for (auto& batch : batches) {
    batch_info.global_step = global_step;
    const auto samples = batch.size();
    add_results(meters, train_batch(batch, batch_info), samples);
    step_schedulers(SchedulerStepFreq::batch);
    ++batch_info.batch_idx;
    ++global_step;
  }
  step_schedulers(SchedulerStepFreq::epoch);
  return meters.summary();
}

Metrics TrainingOperator::train_batch(Batch& batch, const BatchInfo&) {
  auto& registry = this->registry();
  detail::operators::require_one_of_each(registry, "training a batch", "train_batch()");
  if (registry.optimizers.empty())
    throw Error(ExitCode::user_error, "training a batch", "no optimizer was registered", "Override train_batch()");
  const auto [features, target] =
      detail::operators::split("training a batch", registry, registry.train.passes(), batch);
  auto& optimizer = *registry.optimizers.front();
  at::Tensor loss;
  {
    const auto time = timers.record("fwd");
    const auto cast = autocast();
    loss = detail::operators::compute_loss("training a batch", registry, registry.forward(features), target);
  }
  {
    const auto time = timers.record("grad");
    optimizer.zero_grad();
    scaler().scale(loss).backward();
  }
  {
    const auto time = timers.record("apply");
    scaler().step(optimizer);
    scaler().update();
  }
  return {{"train_loss", loss}, {"num_samples", batch.size()}};
}

Metrics TrainingOperator::validate(OperatorBatches& batches, const EpochInfo& info) {
  AverageMeterCollection meters;
  BatchInfo batch_info{info};
  batch_info.global_step = global_step;
  for (auto& batch : batches) {
    const auto samples = batch.size();
    add_results(meters, validate_batch(batch, batch_info), samples);
    ++batch_info.batch_idx;
  }
  return meters.summary();
}

Metrics TrainingOperator::validate_batch(Batch& batch, const BatchInfo&) {
  auto& registry = this->registry();
  detail::operators::require_one_of_each(registry, "validating a batch", "validate_batch()");
  const auto [features, target] =
      detail::operators::split("validating a batch", registry, registry.validation.passes(), batch);
  at::Tensor output, loss;
  {
    const auto time = timers.record("eval_fwd");
    const auto cast = autocast();
    output = registry.forward(features);
    loss = detail::operators::compute_loss("validating a batch", registry, output, target);
  }
  double accuracy = std::nan("");
  if (at::isIntegralType(target.scalar_type(), /*includeBool=*/true) && output.dim() == target.dim() + 1 &&
      output.size(1) > 1)
    accuracy = output.argmax(1).eq(target).to(at::kDouble).mean().item<double>();
  return {{"val_loss", loss}, {"val_accuracy", accuracy}, {"num_samples", batch.size()}};
}

void TrainingOperator::register_data(OperatorLoader train_loader, std::optional<OperatorLoader> validation_loader) {
  auto& registry = this->registry();
  const bool split = registry.options.add_dist_sampler;
  ++registry.data_registration_count;
  registry.train.set_passes(train_loader.make_(registry, {.training = true, .split = split}));
  if (validation_loader)
    registry.validation.set_passes(validation_loader->make_(registry, {.training = false, .split = split}));
}

void TrainingOperator::check_registration(bool has_schedulers, const Json& apex_args) const {
  if (!apex_args.is_null())
    throw Error(ExitCode::usage, "registering what is trained", "apex_args are for Apex, which libtorch does not have",
                "Leave them out; use_fp16 is torch's own mixed precision");
  if (has_schedulers && !scheduler_step_freq())
    throw Error(ExitCode::usage, "registering a scheduler", "the trainer has no scheduler_step_freq",
                "Give OperatorTrainerOptions::scheduler_step_freq: batch, epoch, or manual to step it yourself");
  if (!registry().models.empty())
    throw Error(ExitCode::user_error, "registering what is trained", "something is registered already",
                "Register all at once; several models and optimizers as a std::tuple of each");
}

// RaySGD's order is device, mixed precision, data parallelism. prepare_model() does the first and the last. Mixed
// precision needs no step here: autocast does not change the parameters' types.
void TrainingOperator::add_model(const std::shared_ptr<torch::nn::Module>& module) {
  auto options = registry().options.ddp_args;
  if (!registry().options.wrap_ddp) options.parallel = Parallel::none;
  registry().models.push_back(session().prepare_model(module, options));
}

void TrainingOperator::set_forward(detail::operators::Forward forward) { registry().forward = std::move(forward); }

void TrainingOperator::set_criterion(detail::operators::Criterion criterion,
                                     const std::shared_ptr<torch::nn::Module>& module) {
  if (module) module->to(device());
  registry().criterion = std::move(criterion);
  registry().elementwise = detail::operators::is_elementwise(module.get());
}

void TrainingOperator::add_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer) {
  registry().optimizers.push_back(std::move(optimizer));
}

void TrainingOperator::add_scheduler(std::shared_ptr<torch::optim::LRScheduler> scheduler) {
  // PyTorch's schedulers make a first step, which changes nothing, when they are constructed; libtorch's do not, so
  // StepLR would decay one step late. Only for StepLR: a user's own scheduler may change something in its first step.
  if (dynamic_cast<const torch::optim::StepLR*>(scheduler.get()) && (*scheduler).*detail::optim::StepCount::of == 0)
    scheduler->step();
  registry().schedulers.push_back(std::move(scheduler));
}

void TrainingOperator::add_scheduler(std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler) {
  registry().plateaus.push_back(std::move(scheduler));
}

Session& TrainingOperator::session() const { return registry().session; }
at::Device TrainingOperator::device() const { return session().get_device(); }
const Config& TrainingOperator::config() const { return registry().config; }
int TrainingOperator::world_rank() const { return session().world_rank(); }
int TrainingOperator::local_rank() const { return session().local_rank(); }
bool TrainingOperator::use_gpu() const { return device().is_cuda(); }
bool TrainingOperator::use_fp16() const { return registry().options.use_fp16; }
bool TrainingOperator::use_tqdm() const { return registry().options.use_tqdm; }
std::optional<SchedulerStepFreq> TrainingOperator::scheduler_step_freq() const {
  return registry().options.scheduler_step_freq;
}

Autocast TrainingOperator::autocast() const {
  return session().autocast({.dtype = use_gpu() ? at::kHalf : at::kBFloat16, .enabled = use_fp16()});
}
GradScaler& TrainingOperator::scaler() const { return *registry().scaler; }

}  // namespace muster
