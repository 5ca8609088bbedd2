// RaySGD's operator API: a class that defines what is trained, and a trainer whose train() and validate() main calls.
//
//   struct Fit : muster::TrainingOperator {
//     void setup(const muster::Config& config) override {
//       torch::nn::Linear net(1, 1);
//       register_training(Components{.models = net,
//                                    .optimizers = torch::optim::SGD(net->parameters(), 0.1),
//                                    .criterion = torch::nn::MSELoss()});  // with y of [samples, 1], as the output
//       register_data({muster::Dataset("train.h5"), {.batch_size = config.at(muster::BATCH_SIZE)}, {{"x"}, "y"}});
//     }
//   };
//
//   int main(int argc, char** argv) {
//     muster::Launch launch(argc, argv);
//     return launch.run([&] {
//       muster::OperatorTrainer<Fit> trainer(launch, {.config = {{muster::BATCH_SIZE, 120}},
//                                                     .num_workers = launch.size()});
//       for (int epoch = 0; epoch < 5; ++epoch) {
//         const auto results = trainer.train();
//         if (launch.rank() == 0) std::cout << results << "\n";       // what a driver would do
//       }
//       trainer.save("fit");
//       trainer.shutdown();
//     });
//   }
//
// There is no driver: main runs on every rank, and ranks that do not train make the calls too, and wait. Put what must
// happen only once behind `if (launch.rank() == 0)`.
//
// The default train_batch() and validate_batch() take a batch as (features…, target). These are the columns that
// BatchColumns names; by default all columns in the order in which they were given (Dataset::from_tensors,
// DatasetOptions::columns), with the last one as the target. Columns of a file or of JSON objects have no order, so
// they must be named.
#pragma once

#include <muster/config.hpp>
#include <muster/detail/export.hpp>
#include <muster/detail/operator.hpp>
#include <muster/launch.hpp>
#include <muster/metrics.hpp>
#include <muster/session.hpp>
#include <muster/trainer.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

/// The configuration's key for the number of samples per step over all workers. In the operator's configuration its
/// value is already one worker's share; a share that is not a whole number is rounded down, with a warning.
inline constexpr const char* BATCH_SIZE = "*batch_size";

/// When the default train_epoch() steps the schedulers. A scheduler that needs a metric is stepped by
/// OperatorTrainer::update_scheduler() only. The first step() of a torch::optim::StepLR changes nothing in C++ (in
/// Python the constructor makes that step); register_training() makes it, so that the rates are the same as in Python.
/// It does not step schedulers of your own classes.
enum class SchedulerStepFreq { batch, epoch, manual };

/// Describes one call of train() or validate().
struct EpochInfo {
  std::int64_t epoch_idx = 0;                  ///< passes over the training data begun before the current one
  std::optional<std::int64_t> num_steps = {};  ///< number of batches; empty: rest of the pass (train) or all (validate)
  Json info = Json::object();                  ///< TrainOptions::info or ValidateOptions::info
};
/// Describes one batch of a call of train() or validate(), and the call.
struct BatchInfo : EpochInfo {
  std::int64_t batch_idx = 0;
  std::int64_t global_step = 0;  ///< training batches before this one, those of earlier calls included
};

/// Means over batches, for your own train_epoch() or validate().
class MUSTER_API AverageMeterCollection {
 public:
  /// Adds the metrics of one batch. The batch's weight is `n`, or else its metric num_samples, or else 1. A batch of
  /// weight 0 increases batch_count. Its values count only as last_m, for metrics m that no earlier batch has. A Mean
  /// of the batch, such as one over its tokens, has its own weight.
  void update(const Metrics& metrics, std::optional<std::int64_t> n = {});
  /// Returns num_samples and batch_count, and for each metric m its mean as m and its value in the last batch with a
  /// weight as last_m. A metric of classification.hpp is computed over the samples of all batches. For any other metric
  /// that is not a number, both are the last value.
  Metrics summary() const;

 private:
  struct Meter {
    Mean mean = {};
    std::vector<Json> accumulators = {};  ///< of single batches or merged ones; for a metric of classification.hpp
    std::optional<Metric> last = {};
    std::int64_t last_weight = 0;
  };
  std::map<std::string, Meter> meters_;
  std::int64_t samples_ = 0, batches_ = 0;
};

/// Measures seconds by name while enabled, as in calls with TrainOptions::profile or ValidateOptions::profile.
class MUSTER_API Timers {
 public:
  class Scope {
   public:
    Scope(Timers* timers, std::string name)
        : timers_(timers), name_(std::move(name)), period_(timers ? timers->period_ : 0) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (timers_ && period_ == timers_->period_)
        timers_->seconds_[name_].add(std::chrono::duration<double>(Clock::now() - begin_).count());
    }

   private:
    friend class Timers;
    using Clock = std::chrono::steady_clock;
    Timers* timers_;
    std::string name_;
    std::int64_t period_;
    Clock::time_point begin_ = Clock::now();
  };
  /// While the scope lives, its time is measured: { auto scope = timers.record("fwd"); … }
  [[nodiscard]] Scope record(std::string name) { return {enabled_ ? this : nullptr, std::move(name)}; }
  /// Enables or disables the timers, and forgets all earlier measurements, those of living scopes too.
  void enable(bool enabled) {
    seconds_.clear();
    enabled_ = enabled;
    ++period_;
  }
  /// The mean of each timer, as mean_NAME_s.
  Json stats() const;

 private:
  std::map<std::string, Mean> seconds_;
  bool enabled_ = false;
  std::int64_t period_ = 0;  // counts the calls of enable()
};

/// The columns of an operator's batches: the features in this order, and then the target.
struct BatchColumns {
  std::vector<std::string> features = {};  ///< empty: all columns but the target
  std::string target = {};                 ///< empty: the one column that is not a feature
};

/// Where the batches of an operator's train() or validate() come from: a dataset, or a data loader.
class MUSTER_API OperatorLoader {
 public:
  /// A dataset, split among the workers; if OperatorTrainerOptions::add_dist_sampler is false, each worker takes all of
  /// it.
  ///
  ///   register_data({muster::Dataset("train.h5"), {.batch_size = 64}, {.features = {"x"}, .target = "label"}});
  OperatorLoader(Dataset dataset, BatchOptions options = {}, BatchColumns columns = {});
  /// A torch dataset, divided in the same way; needs <muster/data_loader.hpp>. Examples are stacked unless the dataset
  /// stacks them itself, and a batch has the columns data and target.
  template <class TorchDataset>
  requires requires { typename TorchDataset::BatchType; }
  OperatorLoader(TorchDataset dataset, const DataLoaderOptions& options)
      : make_(detail::operators::make_passes_of(std::move(dataset), options)) {}
  /// A loader that prepare_data_loader(session(), …) returned, for either train() or validate(). It is already divided
  /// among the workers, so with OperatorTrainerOptions::add_dist_sampler = false it is an Error, unless it has your own
  /// sampler.
  template <class Loader>
  requires requires(Loader& loader) { loader.batch_samples(); }
  OperatorLoader(std::unique_ptr<Loader> loader) : make_(detail::operators::make_passes_of(std::move(loader))) {}

 private:
  friend class TrainingOperator;
  detail::operators::MakePasses make_;
};

/// The batches of one call of train() or validate(): for (auto& batch : batches) …
class OperatorBatches {
 public:
  class iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    Batch& operator*() const noexcept { return *batch_; }
    Batch* operator->() const noexcept { return batch_; }
    iterator& operator++() {
      batch_ = source_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const iterator& a, std::default_sentinel_t) noexcept { return a.batch_ == nullptr; }

   private:
    friend class OperatorBatches;
    detail::operators::BatchSource* source_ = nullptr;
    Batch* batch_ = nullptr;
  };
  explicit OperatorBatches(detail::operators::BatchSource& source) : source_(&source) {}
  /// A call of validate() may iterate over its batches several times, each time from the first one. A call of train()
  /// gets each of its batches once: begin() continues with those that are left.
  iterator begin() {
    iterator first;
    first.source_ = source_;
    first.batch_ = source_->first();
    return first;
  }
  std::default_sentinel_t end() const noexcept { return {}; }

 private:
  detail::operators::BatchSource* source_;
};

/// Defines what is trained and how; there is one on every worker. Derive your own, override setup(), and override other
/// methods where you need something else. All workers must call what takes part in training (register_training(), the
/// losses' backward()) alike.
class MUSTER_API TrainingOperator {
 public:
  TrainingOperator();
  TrainingOperator(const TrainingOperator&) = delete;
  TrainingOperator& operator=(const TrainingOperator&) = delete;
  virtual ~TrainingOperator();

  /// Registers the models and the data, before the first call. `config` has this worker's share of BATCH_SIZE.
  virtual void setup(const Config& config) = 0;

  /// One call of train(): puts the models into training mode, calls train_batch() for each batch, and steps the
  /// schedulers. Its result is reduced over the workers.
  virtual Metrics train_epoch(OperatorBatches& batches, const EpochInfo& info);
  /// Forward, backward and step, with one model, optimizer and criterion; returns train_loss and num_samples. An Error
  /// if the criterion would broadcast output and target against each other, such as [8, 1] and [8] to [8, 8].
  virtual Metrics train_batch(Batch& batch, const BatchInfo& info);
  /// One call of validate(). No gradients are recorded, and the models are in evaluation mode.
  virtual Metrics validate(OperatorBatches& batches, const EpochInfo& info);
  /// Returns val_loss, val_accuracy and num_samples. Rejects the same losses as train_batch(). The predicted class is
  /// the largest output of each row; the accuracy is NaN if targets are not classes or there is only one output.
  virtual Metrics validate_batch(Batch& batch, const BatchInfo& info);

  /// State to save in addition to models, optimizers, schedulers and counters; the same on all workers.
  virtual StateDict state_dict() { return {}; }
  virtual void load_state_dict(const StateDict& /*state*/) {}

  /// What setup() registers: one of each, or several as a std::tuple. register_training() moves the models to the
  /// device. From then on their gradients are averaged, unless OperatorTrainerOptions::wrap_ddp is false.
  ///
  ///   auto [g, d, g_optimizer, d_optimizer] = register_training(Components{
  ///       .models = std::tuple(Generator(), Discriminator()), .optimizers = std::tuple(…), .criterion = bce});
  template <class Models, class Optimizers, class Criterion = std::nullptr_t, class Schedulers = std::tuple<>>
  struct Components {
    Models models;
    Optimizers optimizers;
    /// Any callable (output, target) that returns the loss, including a module; may be left out if the default
    /// train_batch() and validate_batch() are not used.
    Criterion criterion = {};
    /// Functions that make a scheduler for an optimizer: the first for the first optimizer and so on, as in
    /// [](auto& optimizer) { return torch::optim::StepLR(optimizer, 10); }. Needs
    /// OperatorTrainerOptions::scheduler_step_freq.
    Schedulers schedulers = {};
    /// These options hold for all optimizers.
    OptimizerOptions optimizer_options = {};
    /// RaySGD's options for NVIDIA's Apex. libtorch has no Apex, so giving them is an Error.
    Json apex_args = {};
  };
  /// Returns the models, then the optimizers as std::shared_ptr<PreparedOptimizer<O>>, then the schedulers as
  /// std::shared_ptr, in one std::tuple. Collective.
  template <class Models, class Optimizers, class Criterion, class Schedulers>
  auto register_training(Components<Models, Optimizers, Criterion, Schedulers> components);

  /// Registers the data of train() and validate(). May be called again between two calls of the trainer: this ends the
  /// current pass, and the next train() begins a pass over the new data. An Error (ExitCode::user_error) inside a call.
  void register_data(OperatorLoader train_loader, std::optional<OperatorLoader> validation_loader = {});

  /// Makes an operator from functions, like RaySGD's creators. model_creator(config) returns a model or a std::tuple of
  /// several, optimizer_creator(models, config) an optimizer or a std::tuple, data_creator(config) an OperatorLoader or
  /// a std::pair of them, loss_creator(config) the criterion, scheduler_creator(optimizer, config) the scheduler of the
  /// first optimizer.
  ///
  ///   muster::OperatorTrainer<> trainer(launch, muster::TrainingOperator::from_creators(…), {…});
  template <class ModelCreator, class OptimizerCreator, class DataCreator, class LossCreator = std::nullptr_t,
            class SchedulerCreator = std::nullptr_t>
  static std::function<std::unique_ptr<TrainingOperator>()> from_creators(ModelCreator model_creator,
                                                                          OptimizerCreator optimizer_creator,
                                                                          DataCreator data_creator,
                                                                          LossCreator loss_creator = {},
                                                                          SchedulerCreator scheduler_creator = {});

  /// This worker's session, for everything else: barrier(), mean(), process_group(), add_callback() for setup(), …
  Session& session() const;
  at::Device device() const;
  const Config& config() const;
  int world_rank() const;
  int local_rank() const;
  bool use_gpu() const;
  bool use_fp16() const;
  bool use_tqdm() const;
  std::optional<SchedulerStepFreq> scheduler_step_freq() const;

  /// For your own train_batch() with mixed precision: while autocast() lives, forward passes are cast; then
  /// scaler().scale(loss).backward(), scaler().step(*optimizer), scaler().update(). Without use_fp16 both do nothing.
  /// The scaler does nothing with bfloat16 either, which is used on the CPU.
  [[nodiscard]] Autocast autocast() const;
  GradScaler& scaler() const;

  /// Training batches so far, in all calls; the default train_epoch() counts them.
  std::int64_t global_step = 0;
  Timers timers;

 private:
  friend struct detail::operators::OperatorRegistry;
  template <class Models, class Optimizers, class Criterion, class Schedulers>
  auto register_components(Components<Models, Optimizers, Criterion, Schedulers> components);
  void add_model(const std::shared_ptr<torch::nn::Module>& module);
  void set_forward(detail::operators::Forward forward);
  void set_criterion(detail::operators::Criterion criterion, const std::shared_ptr<torch::nn::Module>& module);
  void add_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer);
  void add_scheduler(std::shared_ptr<torch::optim::LRScheduler> scheduler);
  void add_scheduler(std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler);
  void check_registration(bool has_schedulers, const Json& apex_args) const;
  detail::operators::OperatorRegistry& registry() const;

  std::unique_ptr<detail::operators::OperatorRegistry> registry_;
};

/// Whether an operator's workers compute on GPUs. If a node has more ranks than GPUs, they share them.
enum class UseGpu {
  automatic,  ///< if every rank sees a GPU
  always,     ///< an Error on a rank without a GPU
  never,
};

/// Options of an OperatorTrainer, the same on all ranks. Designated initialisers must keep this order of fields.
struct OperatorTrainerOptions {
  /// Called on every rank before anything else, for example to set environment variables.
  std::function<void()> initialization_hook = {};
  /// The configuration that setup() gets; values from --config and --set override it.
  Config config = Config::object();
  /// Ranks that train, as ScalingConfig::num_workers: a number, or {least, most}; --workers overrides it. The default
  /// is 1, as in RaySGD; in a launch of several ranks a warning says how many of them wait.
  NumWorkers num_workers = {};
  /// Threads of torch per rank; empty: the launch's choice.
  std::optional<int> num_cpus_per_worker = {};
  UseGpu use_gpu = UseGpu::automatic;
  /// See TorchConfig::backend.
  std::string backend = "auto";
  /// False: muster does not average gradients; the operator must do so itself.
  bool wrap_ddp = true;
  ModelOptions ddp_args = {};
  /// How long ranks wait for each other before the job ends; --timeout overrides it.
  std::chrono::milliseconds timeout = std::chrono::seconds(1800);
  /// True: 16 bits where that is safe: half with a scaler on a GPU, bfloat16 on the CPU. The operator casts nothing by
  /// hand. This is torch's own mixed precision, since libtorch has no Apex.
  bool use_fp16 = false;
  /// Shows a progress line while training and a line for each call. A run with --name or --storage, or under
  /// `muster run`, also gets a summary when the trainer is shut down.
  bool use_tqdm = false;
  /// True: the workers divide the samples of register_data(). False: each worker takes all of them.
  bool add_dist_sampler = true;
  /// Required if a scheduler is registered.
  std::optional<SchedulerStepFreq> scheduler_step_freq = {};
};

struct TrainOptions {
  /// The number of batches. They continue where the last call stopped, and start over at the end of the data. Empty:
  /// the rest of the current pass. In a run that saves its state (--name, `muster run`, a sweep) it is an Error for a
  /// stream or a loader with your own sampler, whose positions cannot be saved.
  std::optional<std::int64_t> num_steps = {};
  /// Adds the first worker's timers to the result, as `profile`; with reduce_results = false, each worker's.
  bool profile = false;
  /// True: results are reduced over the workers. False: the result is the list of each worker's results.
  bool reduce_results = true;
  /// How often `muster run` starts the job again after a rank is lost during this call or between it and the next one.
  /// A job is not started again after an exception. --max-failures overrides it, and counts exceptions too.
  int max_retries = 3;
  /// Passed on to the operator as EpochInfo::info.
  Json info = Json::object();
};
struct ValidateOptions {
  /// The number of batches, from the beginning of the data, at most all; empty: all.
  std::optional<std::int64_t> num_steps = {};
  bool profile = false;
  bool reduce_results = true;
  Json info = Json::object();
};

/// Runs an operator on the workers, call by call. Every member function is collective over all ranks of the launch
/// unless it says otherwise, and returns the same on all of them. What is thrown on any worker is thrown on every rank
/// as the same Error, and the trainer cannot be used afterwards. It can still be used after a call that was refused
/// before it changed anything (a number of steps below 1, no loader, no scheduler for a metric, a checkpoint to load
/// that is missing, damaged or does not fit), and after a save() that failed.
///
/// Results. train() returns num_samples, epoch (passes begun so far), batch_count, and for each metric m of
/// train_batch() (by default train_loss) its mean m and its last value last_m. validate() returns the same without
/// epoch (by default for val_loss and val_accuracy). Each row of result.json has the passes begun so far as `epoch`,
/// also the rows of validate() and of a trial's steps, unless a step gives its own `epoch`. Means are over the samples
/// of all workers, so uneven shards do not distort them; num_samples is the sum over the workers, batch_count the mean.
/// A Mean counts by its own samples, and a metric of classification.hpp is computed over the samples of all batches and
/// workers. Any other value that is not a number is the first worker's. profile=true adds the map `profile`:
/// mean_fwd_s, mean_grad_s, mean_apply_s, mean_train_epoch_s, or mean_eval_fwd_s, mean_validation_s. A metric with the
/// name of a field that every report has, such as world_size, is an Error as in Session::report(); num_samples is
/// allowed.
///
/// Restarts. A lost rank ends the job. Under `muster run`, and in a run that was named by --name, train() saves the
/// state and the results of all calls so far: at its end, and also at its beginning if other calls have changed the
/// state. When the job is started again, with the ranks that are then available, main runs from its beginning. Calls
/// that the saved state contains return their saved results at once, and training continues at the train() that was cut
/// off, or at the one before it if the state was still being written. Everything else in main is done again, including
/// apply_all_workers(). A state_dict() that main took before is gone; save() and load() keep one. An
/// apply_all_operators() that registered data is made again, with the state of the operator and of the random
/// generators as they are then: so the data may depend on the arguments and the configuration only. A run that is
/// stopped on request saves in the middle of a call; the call then continues with the batches that are left, and
/// returns the means over those.
///
/// shutdown() marks the run as finished. If it is started again under its name, its calls up to the last train() return
/// their saved results, even if the configuration has changed since, which is a warning. Later calls are made again,
/// and if main has become longer, training continues. If main makes fewer calls than the saved state contains,
/// shutdown() is an Error (ExitCode::usage).
/// Several trainers of one main have separate runs: under --name NAME they are NAME, NAME_2, NAME_3, ..., in the order
/// in which main makes the trainers, which must be the same in each start.
///
/// A trainer without --name, --storage and `muster run` leaves no folder in ./runs when it is shut down, unless
/// something was saved there. After an error, and after a stop on request, the folder stays.
///
/// If a Callback asks for training to end, the call whose report it was still returns its results. Each later train()
/// throws an Error with ExitCode::done on all ranks, with which Launch::run() ends as done. A program that catches it
/// may continue with all other calls.
class MUSTER_API OperatorTrainerBase {
 public:
  OperatorTrainerBase(const OperatorTrainerBase&) = delete;
  OperatorTrainerBase& operator=(const OperatorTrainerBase&) = delete;
  /// Calls shutdown(), or shutdown(true) during an exception. If shutdown() fails, Launch::run() ends with its error.
  /// Once MPI is finalised it only warns that the run is not marked as finished.
  ~OperatorTrainerBase();

  /// Trains for the rest of a pass, or for TrainOptions::num_steps batches.
  Json train(const TrainOptions& options = {});
  Json validate(const ValidateOptions& options = {});

  /// Calls `function` on every worker; returns its results as a list, in the order of ranks.
  Json apply_all_workers(const std::function<Json()>& function);
  /// Steps the schedulers that need a metric, with the value that rank 0 gives.
  void update_scheduler(double metric);

  /// Models, optimizers, schedulers, scaler, counters and the operator's own state: copies, on the CPU.
  StateDict state_dict();
  /// Compares everything first; if a name, a shape or a type differs, nothing is changed. There is no `blocking` as in
  /// RaySGD: the call returns when all workers have the state. The next train() begins a new pass.
  void load_state_dict(const StateDict& state);
  /// Saves state_dict() as a checkpoint in the folder `path`. It replaces a checkpoint there once the new one is
  /// complete; if anything else is there, it stays, and the call is an Error. One model is the entry "model"; several
  /// are "model_0" and so on. Rank 0 writes.
  void save(const std::filesystem::path& path);
  /// Loads a checkpoint that save() has written, as load_state_dict() loads a state. Rank 0 reads.
  void load(const std::filesystem::path& path);

  /// The registered model with this number, from 0 on: the model itself, which may be trained further, or with `to_cpu`
  /// a copy on the CPU, for which its class must derive from torch::nn::Cloneable, as torch's own do. An Error on a
  /// rank that does not train. Not collective.
  template <class Model = torch::nn::Module>
  std::shared_ptr<Model> get_model(bool to_cpu = false, std::size_t number = 0) {
    const auto model = std::dynamic_pointer_cast<Model>(model_of(to_cpu, number));
    if (!model) refuse_type(number);
    return model;
  }

  /// Ends the trainer after the last state has been written. `force`: waits for no other rank, as after an exception,
  /// and is not collective. Afterwards, only get_model() and get_local_operator() may be called.
  void shutdown(bool force = false);

 protected:
  OperatorTrainerBase(Launch& launch, std::function<std::unique_ptr<TrainingOperator>()> make,
                      OperatorTrainerOptions options);
  /// Runs one trial of a sweep: `num_iterations` calls of `step`, or of the default step if `step` is empty.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  /// Returns `options` as changed for a trial with these settings on the ranks of `launch`.
  static OperatorTrainerOptions of_trial(OperatorTrainerOptions options, const Launch& launch, const Config& settings);
  TrainingOperator& local_operator();
  Json apply_operators(const std::function<Json(TrainingOperator&)>& function);

 private:
  std::shared_ptr<torch::nn::Module> model_of(bool to_cpu, std::size_t number);
  [[noreturn]] static void refuse_type(std::size_t number);
  std::unique_ptr<detail::operators::OperatorRun> run_;
};

template <class Operator = TrainingOperator>
class OperatorTrainer : public OperatorTrainerBase {
 public:
  using Make = std::function<std::unique_ptr<Operator>()>;
  /// What a trial does in one iteration, numbered from 0; returns what is reported for it.
  using TuneStep = std::function<Json(OperatorTrainer& trainer, std::int64_t iteration)>;

  /// Sets everything up and calls Operator::setup() on every worker. What it throws is thrown on every rank.
  explicit OperatorTrainer(Launch& launch, OperatorTrainerOptions options = {}) requires(!std::is_abstract_v<Operator>)
      : OperatorTrainerBase(
            launch, [] { return std::make_unique<Operator>(); }, std::move(options)) {}
  /// The same, with operators that `make` returns.
  OperatorTrainer(Launch& launch, Make make, OperatorTrainerOptions options = {})
      : OperatorTrainerBase(launch, std::move(make), std::move(options)) {}

  /// For a sweep (muster/sweep.hpp): each trial has its own trainer, on all ranks of its group unless num_workers is
  /// smaller. The trial's settings override options.config; an unknown setting is an Error (ExitCode::usage). A trial
  /// makes `num_iterations` steps, or fewer if the sweep's scheduler ends it. A step is a train() and, if there is a
  /// validation_loader, a validate(); or a call of `override_tune_step`, which must do the same on every rank. The
  /// step's result, a JSON object with the sweep's metric, is one report of the trial, and the state is saved with it.
  ///
  ///   muster::Sweep(launch, muster::OperatorTrainer<Fit>::as_trainable({.config = {{"lr", 0.1}}}, 10),
  ///                 {.space = {{"lr", muster::log_uniform(1e-4, 1e-1)}}, .num_samples = 8, .metric = "val_loss",
  ///                  .mode = muster::ScoreOrder::min}).fit();
  static Trainable as_trainable(OperatorTrainerOptions options, std::int64_t num_iterations,
                                TuneStep override_tune_step = {}) requires(!std::is_abstract_v<Operator>) {
    return as_trainable([] { return std::make_unique<Operator>(); }, std::move(options), num_iterations,
                        std::move(override_tune_step));
  }
  static Trainable as_trainable(Make make, OperatorTrainerOptions options, std::int64_t num_iterations,
                                TuneStep override_tune_step = {}) {
    return [=](Launch& launch, const Config& settings) {
      OperatorTrainer trainer(launch, make, of_trial(options, launch, settings));
      if (!override_tune_step) return trainer.run_trial(num_iterations, {});
      return trainer.run_trial(num_iterations,
                               [&](std::int64_t iteration) { return override_tune_step(trainer, iteration); });
    };
  }

  /// This worker's operator; an Error on a rank that does not train. Not collective.
  Operator& get_local_operator() { return static_cast<Operator&>(local_operator()); }
  /// Calls `function` on every worker, with its operator; returns the results as a list, in the order of ranks.
  Json apply_all_operators(const std::function<Json(Operator&)>& function) {
    return apply_operators([&](TrainingOperator& each) { return function(static_cast<Operator&>(each)); });
  }
};

// The rest of this file implements register_training() and from_creators().

template <class Models, class Optimizers, class Criterion, class Schedulers>
auto TrainingOperator::register_training(Components<Models, Optimizers, Criterion, Schedulers> components) {
  using namespace detail::operators;
  static_assert(are_optimizers<decltype(as_tuple(std::move(components.optimizers)))>,
                "Components::optimizers takes optimizers by value, as in .optimizers = torch::optim::SGD(...), and no "
                "pointers to them: register_training() gives the shared_ptr.");
  if constexpr (are_optimizers<decltype(as_tuple(std::move(components.optimizers)))>)
    return register_components(std::move(components));
}

template <class Models, class Optimizers, class Criterion, class Schedulers>
auto TrainingOperator::register_components(Components<Models, Optimizers, Criterion, Schedulers> components) {
  using namespace detail::operators;
  auto models = as_tuple(std::move(components.models));
  auto given = as_tuple(std::move(components.optimizers));
  const auto makers = as_tuple(std::move(components.schedulers));
  check_registration(std::tuple_size_v<decltype(makers)> > 0, components.apex_args);
  std::apply([&](auto&... model) { (add_model(module_of(model)), ...); }, models);
  if constexpr (std::tuple_size_v<decltype(models)> == 1) set_forward(forward_of(std::get<0>(models)));
  if constexpr (!std::is_same_v<Criterion, std::nullptr_t>)
    set_criterion(criterion_of(components.criterion), module_or_null(components.criterion));
  auto optimizers = std::apply(
      [&](auto&... optimizer) {
        return std::tuple{[&](auto& one) {
          auto prepared = std::make_shared<PreparedOptimizer<std::remove_reference_t<decltype(one)>>>(
              session().prepare_optimizer(std::move(one), components.optimizer_options));
          add_optimizer(prepared);
          return prepared;
        }(optimizer)...};
      },
      given);
  auto schedulers = make_schedulers(makers, optimizers);
  std::apply([&](auto&... scheduler) { (add_scheduler(scheduler), ...); }, schedulers);
  return std::tuple_cat(std::move(models), std::move(optimizers), std::move(schedulers));
}

template <class ModelCreator, class OptimizerCreator, class DataCreator, class LossCreator, class SchedulerCreator>
std::function<std::unique_ptr<TrainingOperator>()> TrainingOperator::from_creators(ModelCreator model_creator,
                                                                                   OptimizerCreator optimizer_creator,
                                                                                   DataCreator data_creator,
                                                                                   LossCreator loss_creator,
                                                                                   SchedulerCreator scheduler_creator) {
  struct Created final : TrainingOperator {
    ModelCreator model_creator;
    OptimizerCreator optimizer_creator;
    DataCreator data_creator;
    LossCreator loss_creator;
    SchedulerCreator scheduler_creator;

    Created(ModelCreator model, OptimizerCreator optimizer, DataCreator data, LossCreator loss,
            SchedulerCreator scheduler)
        : model_creator(model),
          optimizer_creator(optimizer),
          data_creator(data),
          loss_creator(loss),
          scheduler_creator(scheduler) {}

    void setup(const Config& config) override {
      auto models = model_creator(config);
      auto optimizers = optimizer_creator(models, config);
      auto criterion = [&] {
        if constexpr (std::is_same_v<LossCreator, std::nullptr_t>)
          return nullptr;
        else
          return loss_creator(config);
      }();
      auto schedulers = [&] {
        if constexpr (std::is_same_v<SchedulerCreator, std::nullptr_t>)
          return std::tuple<>();
        else
          return [this, &config](auto& optimizer) { return scheduler_creator(optimizer, config); };
      }();
      register_training(Components{.models = std::move(models),
                                   .optimizers = std::move(optimizers),
                                   .criterion = std::move(criterion),
                                   .schedulers = std::move(schedulers)});
      auto data = data_creator(config);
      if constexpr (requires { data.first, data.second; })
        register_data(std::move(data.first), std::move(data.second));
      else
        register_data(std::move(data));
    }
  };
  return [=] {
    return std::make_unique<Created>(model_creator, optimizer_creator, data_creator, loss_creator, scheduler_creator);
  };
}

}  // namespace muster
