// RaySGD's operator API: a class that says what is trained, and a trainer whose train() and validate() main calls.
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
//         if (launch.rank() == 0) std::cout << results << "\n";       // what only a driver would do
//       }
//       trainer.save("fit");
//       trainer.shutdown();
//     });
//   }
//
// There is no driver: main runs on every rank, all ranks make the same calls of the trainer and get the same results.
// Ranks that do not train make them too, and wait. What is to be done once stands behind `if (launch.rank() == 0)`.
//
// The default train_batch() and validate_batch() take a batch as (features…, target): the columns of the dataset in the
// order in which they were given (Dataset::from_tensors, DatasetOptions::columns), the last one being the target; or
// those that BatchColumns names. Columns of a file or of JSON objects have no order of their own and need the names.
#pragma once

#include <muster/config.hpp>
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

/// The key of the configuration under which the samples of a step over all workers stand. The operator finds there
/// what one worker takes of them: one that does not divide is rounded down, with a warning.
inline constexpr const char* BATCH_SIZE = "*batch_size";

/// When the default train_epoch() steps the schedulers. One that waits for a metric is stepped by
/// OperatorTrainer::update_scheduler() alone. The first step() of torch::optim::StepLR changes nothing, which in Python
/// the constructor makes: register_training() makes it, so that rates are those of Python. One of your own is left
/// alone.
enum class SchedulerStepFreq { batch, epoch, manual };

/// What a call of train() or validate() is.
struct EpochInfo {
  std::int64_t epoch_idx = 0;                  ///< passes over the training data begun before the one that goes on
  std::optional<std::int64_t> num_steps = {};  ///< batches of this call; those of the pass unless given
  Json info = Json::object();                  ///< TrainOptions::info
};
/// What a batch is of its call.
struct BatchInfo : EpochInfo {
  std::int64_t batch_idx = 0;
  std::int64_t global_step = 0;  ///< training batches of all calls before this one
};

/// Means over batches, for those who write a train_epoch() or validate() of their own.
class AverageMeterCollection {
 public:
  /// What one batch has given. It weighs `n`, or what it says as num_samples, or 1; one that weighs 0 counts as a batch
  /// and in nothing else.
  void update(const Metrics& metrics, std::optional<std::int64_t> n = {});
  /// num_samples and batch_count; of each metric m its mean as m and its last value as last_m. What is not a number is
  /// the last value in both.
  Metrics summary() const;

 private:
  struct Meter {
    Mean mean;
    Json last;
    std::int64_t last_samples = 0;
  };
  std::map<std::string, Meter> meters_;
  std::int64_t samples_ = 0, batches_ = 0;
};

/// Seconds by name, while a call is profiled.
class Timers {
 public:
  class Scope {
   public:
    Scope(Timers* timers, std::string name) : timers_(timers), name_(std::move(name)) {}
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (timers_) timers_->seconds_[name_].add(std::chrono::duration<double>(Clock::now() - begin_).count());
    }

   private:
    friend class Timers;
    using Clock = std::chrono::steady_clock;
    Timers* timers_;
    std::string name_;
    Clock::time_point begin_ = Clock::now();
  };
  /// While it lives, time is taken: { auto scope = timers.record("fwd"); … }
  [[nodiscard]] Scope record(std::string name) { return {enabled_ ? this : nullptr, std::move(name)}; }
  /// Forgets what was taken.
  void enable(bool enabled) {
    seconds_.clear();
    enabled_ = enabled;
  }
  /// The mean of each, as mean_NAME_s.
  Json stats() const;

 private:
  std::map<std::string, Mean> seconds_;
  bool enabled_ = false;
};

/// Which columns of a dataset an operator's batches have: the features in this order, and the target as the last one.
struct BatchColumns {
  std::vector<std::string> features = {};  ///< all columns but the target unless given
  std::string target = {};                 ///< the one column that is no feature unless given
};

/// Where an operator's batches come from. A pass over it takes each sample once.
class OperatorLoader {
 public:
  /// Split among the workers; whole on each without OperatorTrainerOptions::add_dist_sampler. Without names a batch has
  /// all columns of the dataset.
  ///
  ///   register_data({muster::Dataset("train.h5"), {.batch_size = 64}, {.features = {"x"}, .target = "label"}});
  OperatorLoader(Dataset dataset, BatchOptions options = {}, BatchColumns columns = {});
  /// One of torch's, in the same way; needs <muster/data_loader.hpp>. Examples are stacked unless they are already, and
  /// a batch has the columns data and target.
  template <class TorchDataset>
  requires requires { typename TorchDataset::BatchType; }
  OperatorLoader(TorchDataset dataset, const DataLoaderOptions& options)
      : make_(detail::train::make_passes_of(std::move(dataset), options)) {}
  /// What prepare_data_loader(session(), …) has given; for one of train() and validate(). It is divided among the
  /// workers already, so it is an Error with OperatorTrainerOptions::add_dist_sampler = false, unless it has a sampler
  /// of your own.
  template <class Loader>
  requires requires(Loader& loader) { loader.batch_samples(); }
  OperatorLoader(std::unique_ptr<Loader> loader) : make_(detail::train::make_passes_of(std::move(loader))) {}

  const detail::train::MakePasses& passes() const noexcept { return make_; }

 private:
  detail::train::MakePasses make_;
};

/// The batches of one call of train() or validate(), one after the other: for (auto& batch : batches) …
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
      batch_ = feed_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const iterator& a, std::default_sentinel_t) noexcept { return a.batch_ == nullptr; }

   private:
    friend class OperatorBatches;
    detail::train::Feed* feed_ = nullptr;
    Batch* batch_ = nullptr;
  };
  explicit OperatorBatches(detail::train::Feed& feed) : feed_(&feed) {}
  /// A call of validate() may go over its batches several times, each time from the first one on. A call of train() has
  /// each of its batches once: begin() goes on with those that are left.
  iterator begin() {
    iterator first;
    first.feed_ = feed_;
    first.batch_ = feed_->first();
    return first;
  }
  std::default_sentinel_t end() const noexcept { return {}; }

 private:
  detail::train::Feed* feed_;
};

/// What is trained, and how; one on every worker. Users derive their own and override setup(), and of the rest what is
/// to be otherwise. What takes part in training (register_training, the losses' backward()) is called by all workers
/// alike.
class TrainingOperator {
 public:
  TrainingOperator();
  TrainingOperator(const TrainingOperator&) = delete;
  TrainingOperator& operator=(const TrainingOperator&) = delete;
  virtual ~TrainingOperator();

  /// Registers what is trained and the data, before the first call. `config` has what one worker takes of BATCH_SIZE.
  virtual void setup(const Config& config) = 0;

  /// A call of train(): the models are in training mode, train_batch() of each batch, the schedulers. What comes back
  /// is reduced over the workers.
  virtual Metrics train_epoch(OperatorBatches& batches, const EpochInfo& info);
  /// forward, backward, step, with one model, optimizer and criterion; gives train_loss and num_samples. An Error where
  /// the criterion would broadcast output and target against each other, as [8, 1] and [8] to [8, 8].
  virtual Metrics train_batch(Batch& batch, const BatchInfo& info);
  /// A call of validate(), during which no gradients are recorded and the models are in evaluation mode.
  virtual Metrics validate(OperatorBatches& batches, const EpochInfo& info);
  /// Gives val_loss, val_accuracy and num_samples, and refuses a loss as train_batch() does. The accuracy is that of
  /// the largest output of each row; it is NaN where targets are no classes or there is one output.
  virtual Metrics validate_batch(Batch& batch, const BatchInfo& info);

  /// What is to be saved beside models, optimizers, schedulers and counters; the same on all workers.
  virtual StateDict state_dict() { return {}; }
  virtual void load_state_dict(const StateDict& /*state*/) {}

  /// What setup() registers: of each one, or several as a std::tuple. The models are moved to the device, get mixed
  /// precision, and their gradients are averaged.
  ///
  ///   auto [g, d, g_optimizer, d_optimizer] = register_training(Components{
  ///       .models = std::tuple(Generator(), Discriminator()), .optimizers = std::tuple(…), .criterion = bce});
  template <class Models, class Optimizers, class Criterion = std::nullptr_t, class Schedulers = std::tuple<>>
  struct Components {
    Models models;
    Optimizers optimizers;
    /// Any callable (output, target) that gives the loss, a module too; none where the default train_batch() and
    /// validate_batch() are not used.
    Criterion criterion = {};
    /// What makes a scheduler of its optimizer, the first of the first optimizer and so on:
    /// [](auto& optimizer) { return torch::optim::StepLR(optimizer, 10); }. Needs
    /// OperatorTrainerOptions::scheduler_step_freq.
    Schedulers schedulers = {};
    /// Of all optimizers.
    OptimizerOptions optimizer_options = {};
    /// RaySGD's, of NVIDIA's Apex, which no libtorch has: an Error where it is given.
    Json apex_args = {};
  };
  /// Gives the models, then the optimizers as std::shared_ptr<PreparedOptimizer<O>>, then the schedulers as
  /// std::shared_ptr, in one std::tuple. Collective.
  template <class Models, class Optimizers, class Criterion, class Schedulers>
  auto register_training(Components<Models, Optimizers, Criterion, Schedulers> components);

  /// What train() and validate() go over. May be called again between two calls of the trainer: a pass under way is
  /// over then, and the next train() begins one over the new data; an Error (ExitCode::user_error) inside a call.
  void register_data(OperatorLoader train_loader, std::optional<OperatorLoader> validation_loader = {});

  /// An operator of functions, for RaySGD's creators: model_creator(config) gives one or a std::tuple of several,
  /// optimizer_creator(models, config) likewise, data_creator(config) an OperatorLoader or a std::pair of them,
  /// loss_creator(config) the criterion, scheduler_creator(optimizer, config) the first optimizer's scheduler.
  ///
  ///   muster::OperatorTrainer<> trainer(launch, muster::TrainingOperator::from_creators(…), {…});
  template <class ModelCreator, class OptimizerCreator, class DataCreator, class LossCreator = std::nullptr_t,
            class SchedulerCreator = std::nullptr_t>
  static std::function<std::unique_ptr<TrainingOperator>()> from_creators(ModelCreator model_creator,
                                                                          OptimizerCreator optimizer_creator,
                                                                          DataCreator data_creator,
                                                                          LossCreator loss_creator = {},
                                                                          SchedulerCreator scheduler_creator = {});

  /// Everything else of the run: barrier(), mean(), process_group(), and add_callback() for setup(), …
  Session& session() const;
  at::Device device() const;
  const Config& config() const;
  int world_rank() const;
  int local_rank() const;
  bool use_gpu() const;
  bool use_fp16() const;
  bool use_tqdm() const;
  std::optional<SchedulerStepFreq> scheduler_step_freq() const;

  /// For a train_batch() of one's own with mixed precision: while autocast() lives, forward passes are cast;
  /// scaler().scale(loss).backward(), scaler().step(*optimizer), scaler().update(). Neither does anything without
  /// use_fp16, nor the scaler with bfloat16, which is taken on the CPU.
  [[nodiscard]] Autocast autocast() const;
  GradScaler& scaler() const;

  /// Training batches so far; the default train_epoch() counts them.
  std::int64_t global_step = 0;
  Timers timers;

 private:
  friend struct detail::train::OperatorParts;
  template <class Models, class Optimizers, class Criterion, class Schedulers>
  auto register_components(Components<Models, Optimizers, Criterion, Schedulers> components);
  void add_model(const std::shared_ptr<torch::nn::Module>& module);
  void set_forward(detail::train::Forward forward);
  void set_criterion(detail::train::Criterion criterion, const std::shared_ptr<torch::nn::Module>& module);
  void add_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer);
  void add_scheduler(std::shared_ptr<torch::optim::LRScheduler> scheduler);
  void add_scheduler(std::shared_ptr<torch::optim::ReduceLROnPlateauScheduler> scheduler);
  void check_registration(bool has_schedulers, const Json& apex_args) const;
  detail::train::OperatorParts& parts() const;

  std::unique_ptr<detail::train::OperatorParts> parts_;
};

/// What an OperatorTrainer is asked for, the same on all ranks. Designated initialisers keep this order of fields.
struct OperatorTrainerOptions {
  /// Called on every rank before anything else, as for environment variables.
  std::function<void()> initialization_hook = {};
  /// For setup(); --config and --set are laid over it.
  Config config = Config::object();
  /// Ranks that train, as ScalingConfig::num_workers: a number, or {least, most}; --workers wins. 1 unless given, as in
  /// RaySGD: in a launch of several a warning says how many wait.
  NumWorkers num_workers = {};
  /// Threads of torch per rank; the launch's choice unless given.
  std::optional<int> num_cpus_per_worker = {};
  /// true, false or "auto": where every rank sees one. More ranks than GPUs on a node share them.
  Json use_gpu = "auto";
  /// As TorchConfig::backend.
  std::string backend = "auto";
  /// Without it gradients are nobody's business but the operator's.
  bool wrap_ddp = true;
  ModelOptions ddp_args = {};
  /// How long ranks wait for each other before the job ends; --timeout wins.
  std::chrono::seconds timeout{1800};
  /// true: 16 bits where that is safe, half with a scaler on a GPU, bfloat16 on the CPU. Nobody casts by hand. "apex"
  /// is refused.
  Json use_fp16 = false;
  /// A progress line while training, and a line for each call.
  bool use_tqdm = false;
  /// Whether the workers divide the samples of register_data(); without it each takes all.
  bool add_dist_sampler = true;
  /// Must be given where a scheduler is registered.
  std::optional<SchedulerStepFreq> scheduler_step_freq = {};
};

struct TrainOptions {
  /// Batches, which go on where the last call has stopped and begin the data again at its end; unless given, those that
  /// are left of a pass. In a run that is kept (see OperatorTrainerBase) an Error over a stream, or a loader with a
  /// sampler of one's own: where it stands cannot be saved.
  std::optional<std::int64_t> num_steps = {};
  /// Adds what one worker's timers have taken, as `profile`.
  bool profile = false;
  /// Without it the list of what each worker has.
  bool reduce_results = true;
  /// How often `muster run` starts the job again for a rank that is lost in this call or, until the next one, after it.
  /// An exception is not tried again. --max-failures wins, and counts exceptions too.
  int max_retries = 3;
  /// For the operator, as EpochInfo::info.
  Json info = Json::object();
};
struct ValidateOptions {
  /// Batches, from the beginning of the data and no more than there are; all unless given.
  std::optional<std::int64_t> num_steps = {};
  bool profile = false;
  bool reduce_results = true;
  Json info = Json::object();
};

/// Runs an operator on the workers, call by call. Every member function is collective over all ranks of the launch
/// unless it says otherwise, and gives the same on all of them. What is thrown on any worker leaves the call on every
/// rank as one Error; the trainer is over then. It goes on after a call that was refused before it changed anything:
/// a number of steps below 1, no loader, no scheduler for a metric, a checkpoint to load that is not there, is damaged
/// or does not fit, and a save() that fails.
///
/// Results. train(): num_samples, epoch (passes begun so far), batch_count, and of each metric m of train_batch(), by
/// default train_loss, its mean m and its last value last_m. validate(): the same without epoch, by default of val_loss
/// and val_accuracy. `epoch` in the rows of result.json is the same number, also in those of validate() and of a
/// trial's steps, unless a step gives one. Means are over the samples of all workers, so uneven shards do not falsify
/// them; num_samples is the sum, batch_count the mean; a metric of classification.hpp, which a train_epoch() or
/// validate() of one's own gives, is that of all workers' samples; what else is no number is the first worker's.
/// profile=true adds the map `profile`: mean_fwd_s, mean_grad_s, mean_apply_s, mean_train_epoch_s, or mean_eval_fwd_s,
/// mean_validation_s.
///
/// A lost rank ends the job. Under `muster run`, and in a run that --name has given a name, train() saves the state and
/// what all calls have given: at its end, and at its beginning where other calls have changed the state. When the job
/// is started again, with the ranks that there are, main runs from its beginning, calls that the saved state knows of
/// give at once what they gave, and training goes on at the train() that was cut off, or the one before where the state
/// was still being written. What main does besides is done again, and so is apply_all_workers(). A state_dict() of
/// before is gone; save() and load() keep one. An apply_all_operators() that has registered data is made again. A run
/// that is stopped on request saves in the middle of a call, which then goes on with the batches that are left, and
/// gives the means over those.
///
/// shutdown() marks the run as finished. Started again under its name, its calls up to the last train() give what they
/// gave, also where the configuration is another one now, of which a warning tells; those after it are made anew, and a
/// main that has become longer trains on. Several trainers of one main have runs of their own: under --name NAME these
/// are NAME, NAME_2, NAME_3, ..., in the order in which main makes the trainers, which is the same in each start.
///
/// A trainer without --name, --storage and `muster run` leaves no folder in ./runs when it is shut down, unless
/// something was saved there. After an error, and after a stop on request, the folder stays.
///
/// Where a Callback wants training to end, the call after whose report it was asked still gives its results. Each
/// train() from then on throws an Error with ExitCode::done, on all ranks, and Launch::run() ends as done with it; who
/// catches it may go on with all other calls.
class OperatorTrainerBase {
 public:
  OperatorTrainerBase(const OperatorTrainerBase&) = delete;
  OperatorTrainerBase& operator=(const OperatorTrainerBase&) = delete;
  /// shutdown(), or shutdown(true) during an exception.
  ~OperatorTrainerBase();

  /// Trains over the rest of a pass, or for so many batches.
  Json train(const TrainOptions& options = {});
  Json validate(const ValidateOptions& options = {});

  /// Calls `function` on every worker; the list of what it gives.
  Json apply_all_workers(const std::function<Json()>& function);
  /// Steps the schedulers that wait for a metric, with the one that rank 0 gives.
  void update_scheduler(double metric);

  /// Models, optimizers, schedulers, scaler, counters and what the operator adds: copies, on the CPU.
  StateDict state_dict();
  /// Everything is compared first, and nothing changed if a name, a shape or a type differs. RaySGD's `blocking` is not
  /// there: it always returns when all workers have it. The next train() begins a pass.
  void load_state_dict(const StateDict& state);
  /// state_dict() as a checkpoint in the folder `path`, in the place of a checkpoint that is there, when it is whole;
  /// anything else that stands there is an Error, and stays. One model is its entry "model", several are "model_0" and
  /// so on. Rank 0 writes.
  void save(const std::filesystem::path& path);
  /// Rank 0 reads.
  void load(const std::filesystem::path& path);

  /// The model of that number, which goes on being trained, or a copy on the CPU, for which its class derives from
  /// torch::nn::Cloneable as torch's own do. On a worker; an Error elsewhere. Not collective.
  template <class Model = torch::nn::Module>
  std::shared_ptr<Model> get_model(bool to_cpu = false, std::size_t number = 0) {
    const auto model = std::dynamic_pointer_cast<Model>(model_of(to_cpu, number));
    if (!model) refuse_type(number);
    return model;
  }

  /// Ends the trainer, when the last state is written. `force`: waits for nobody, as after an exception; not collective
  /// then. Nothing may be called after it but get_model() and get_local_operator().
  void shutdown(bool force = false);

 protected:
  OperatorTrainerBase(Launch& launch, std::function<std::unique_ptr<TrainingOperator>()> make,
                      OperatorTrainerOptions options);
  /// What one trial of a sweep is: steps, the default ones where `step` is empty.
  Result run_trial(std::int64_t num_iterations, const std::function<Json(std::int64_t)>& step);
  /// `options` for a trial with these settings on the ranks of that launch.
  static OperatorTrainerOptions of_trial(OperatorTrainerOptions options, const Launch& launch, const Config& settings);
  TrainingOperator& local_operator();
  Json apply_operators(const std::function<Json(TrainingOperator&)>& function);

 private:
  std::shared_ptr<torch::nn::Module> model_of(bool to_cpu, std::size_t number);
  [[noreturn]] static void refuse_type(std::size_t number);
  std::unique_ptr<detail::train::OperatorRun> run_;
};

template <class Operator = TrainingOperator>
class OperatorTrainer : public OperatorTrainerBase {
 public:
  using Make = std::function<std::unique_ptr<Operator>()>;
  /// What a trial does at that iteration, from 0 on, and what is to be reported of it.
  using TuneStep = std::function<Json(OperatorTrainer& trainer, std::int64_t iteration)>;

  /// Sets all up, and calls Operator::setup() on every worker. What is thrown there leaves on every rank.
  explicit OperatorTrainer(Launch& launch, OperatorTrainerOptions options = {}) requires(!std::is_abstract_v<Operator>)
      : OperatorTrainerBase(
            launch, [] { return std::make_unique<Operator>(); }, std::move(options)) {}
  /// With operators that `make` makes.
  OperatorTrainer(Launch& launch, Make make, OperatorTrainerOptions options = {})
      : OperatorTrainerBase(launch, std::move(make), std::move(options)) {}

  /// For a sweep (muster/sweep.hpp): each trial has a trainer of its own on all ranks of its group unless num_workers
  /// says fewer, with the trial's settings laid over options.config, where an unknown one is an Error
  /// (ExitCode::usage). It makes `num_iterations` steps, or fewer where the sweep's scheduler ends it. A step is a
  /// train() and, where there is a validation_loader, a validate(), or what `override_tune_step` does, on every rank
  /// alike. What it gives, an object, is one report of the trial: with the sweep's metric in it, and the state saved.
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

  /// This worker's; an Error on a rank that does not train. Not collective.
  Operator& get_local_operator() { return static_cast<Operator&>(local_operator()); }
  /// Calls `function` with every worker's operator; the list of what it gives.
  Json apply_all_operators(const std::function<Json(Operator&)>& function) {
    return apply_operators([&](TrainingOperator& each) { return function(static_cast<Operator&>(each)); });
  }
};

// What follows is no more than how register_training() and from_creators() are made.

template <class Models, class Optimizers, class Criterion, class Schedulers>
auto TrainingOperator::register_training(Components<Models, Optimizers, Criterion, Schedulers> components) {
  using namespace detail::train;
  static_assert(are_optimizers<decltype(as_tuple(std::move(components.optimizers)))>,
                "Components::optimizers takes optimizers by value, as in .optimizers = torch::optim::SGD(...), and no "
                "pointers to them: register_training() gives the shared_ptr.");
  if constexpr (are_optimizers<decltype(as_tuple(std::move(components.optimizers)))>)
    return register_components(std::move(components));
}

template <class Models, class Optimizers, class Criterion, class Schedulers>
auto TrainingOperator::register_components(Components<Models, Optimizers, Criterion, Schedulers> components) {
  using namespace detail::train;
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
