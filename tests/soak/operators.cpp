// Plays random programs over OperatorTrainer. Compares the result of each call, and the state after it, with a plain
// model of RaySGD's semantics (operator_model.hpp). Some programs have a name: an exception ends them in the middle,
// and they are started again with other numbers of workers until they finish.
//   mpirun -n RANKS operators --first SEED --count PROGRAMS
//   mpirun -n RANKS operators --seed SEED                      one program, printed call by call
//   mpirun -n RANKS operators --killed SEED --start N --ending FILE --name NAME --storage FOLDER
// The last form is one start of a program that has a name. In every start but the last, a rank kills itself and notes
// this in FILE.ending. Ends with 1 if anything differs, and prints the command that repeats the program.
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "soak/operator_model.hpp"

#include <ATen/ATen.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

namespace fs = std::filesystem;
using Kind = OperatorCall::Kind;
using Schedule = OperatorSettings::Schedule;
using Place = OperatorFault::Place;

/// Rounding error of a whole program in double precision.
constexpr double tolerance = 1e-10;
/// The start that nothing interrupts.
constexpr int last_start = 4;
constexpr int most_ranks = 4;
constexpr const char* names[] = {
    "make",          "train",           "validate",         "save",          "load",
    "state_dict",    "load_state_dict", "update_scheduler", "apply_workers", "apply_operators",
    "register_data", "shutdown",        "forced_shutdown",  "destroy"};

Dice dice_of(std::uint64_t seed, std::uint64_t what) { return Dice(seed * 0x9e3779b97f4a7c15ULL + what); }

/// True if the trainer may be unusable after this call.
bool may_end(const OperatorCall& call) {
  return call.kind == Kind::shutdown || call.kind == Kind::forced_shutdown || call.num_steps == 0 ||
         call.fault.place != Place::none || call.kind == Kind::load || call.kind == Kind::load_state_dict ||
         call.kind == Kind::update_scheduler || (call.kind == Kind::save && call.which != -1);
}

/// `again`: the program is started several times. It then keeps no state_dict() and never forces a shutdown.
OperatorProgram draw(std::uint64_t seed, bool again) {
  auto dice = dice_of(seed, 11);
  OperatorProgram program;
  auto& s = program.settings;
  s.widths = {dice.between(1, 4)};
  for (int i = dice.between(0, 2); i > 0; --i) s.widths.push_back(dice.one_of({1, 3, 8, 33}));
  s.widths.push_back(1);
  s.batch = dice.between(1, 9);
  s.samples = dice.between(1, 30);
  s.checked = dice.between(1, 12);
  s.checked_batch = dice.between(1, 7);
  s.shuffle = dice.chance(0.5);
  s.adam = dice.chance(0.5);
  s.fuse = dice.chance(0.5);
  s.lr = dice.real(0.001, 0.02);
  if (dice.chance(0.5)) s.momentum = dice.real(0.2, 0.9);
  if (dice.chance(0.5)) s.weight_decay = dice.real(0.001, 0.1);
  s.schedule = dice.one_of({Schedule::none, Schedule::step, Schedule::plateau});
  s.steps =
      dice.one_of({OperatorSettings::Steps::batch, OperatorSettings::Steps::epoch, OperatorSettings::Steps::manual});
  s.step_size = dice.between(1, 4);
  s.patience = dice.between(0, 2);
  s.gamma = dice.one_of({0.375, 0.5, 0.75, 0.875});  // exact in the float that the plateau scheduler takes

  const int trainers = dice.one_of({1, 1, 2, 3});
  std::vector<int> open_trainers;
  std::vector<int> saves, states;
  const int calls = dice.between(4, 30);
  int made = 0;
  while (made < trainers || static_cast<int>(program.calls.size()) < calls) {
    const int number = static_cast<int>(program.calls.size());
    OperatorCall call;
    if (open_trainers.empty() || (made < trainers && dice.chance(0.25))) {
      call.kind = Kind::make;
      call.trainer = made++;
      open_trainers.push_back(call.trainer);
      program.calls.push_back(call);
      continue;
    }
    const auto place = static_cast<std::size_t>(dice.below(static_cast<int>(open_trainers.size())));
    call.trainer = open_trainers[place];
    const auto steps = [&](std::int64_t most) {
      if (dice.chance(0.6)) call.num_steps = dice.between(1, static_cast<int>(most));
      if (dice.chance(0.02)) call.num_steps = 0;
    };
    const double which = dice.real();
    if (which < 0.38) {
      call.kind = Kind::train;
      steps(2 * s.batches(s.samples) + 2);
      if (dice.chance(0.04)) call.max_retries = -1;
    } else if (which < 0.50) {
      call.kind = Kind::validate;
      steps(s.checked_batches() + 2);
    } else if (which < 0.60) {
      call.kind = Kind::save;
      if (dice.chance(0.05))
        call.which = 0;
      else
        saves.push_back(number);
    } else if (which < 0.74) {
      call.kind = Kind::load;
      if (!saves.empty() && !dice.chance(0.05))
        call.which = saves[static_cast<std::size_t>(dice.below(static_cast<int>(saves.size())))];
      if (saves.empty() && !dice.chance(0.05)) continue;
    } else if (which < 0.79) {
      call.kind = Kind::state_dict;
      if (again) continue;
      states.push_back(number);
    } else if (which < 0.86) {
      call.kind = Kind::load_state_dict;
      if (again || (states.empty() && !dice.chance(0.05))) continue;
      if (!states.empty() && !dice.chance(0.05))
        call.which = states[static_cast<std::size_t>(dice.below(static_cast<int>(states.size())))];
    } else if (which < 0.90) {
      call.kind = Kind::update_scheduler;
      if (s.schedule != Schedule::plateau && !dice.chance(0.05)) continue;
      call.metric = dice.below(8);
    } else if (which < 0.925) {
      call.kind = Kind::apply_all_workers;
    } else if (which < 0.965) {
      call.kind = Kind::apply_all_operators;
    } else if (which < 0.975) {
      call.kind = Kind::register_data;
      // Often as many samples as before, for which an old position would fit.
      call.samples = dice.chance(0.3) ? s.samples : dice.between(1, 30);
    } else if (which < 0.985) {
      call.kind = again || dice.chance(0.7) ? Kind::shutdown : Kind::forced_shutdown;
    } else {
      call.kind = Kind::destroy;
      open_trainers.erase(open_trainers.begin() + static_cast<std::ptrdiff_t>(place));
    }
    call.profile = dice.chance(0.2);
    call.reduce = !dice.chance(0.15);
    if ((call.kind == Kind::train || call.kind == Kind::validate) && dice.chance(0.04))
      call.fault = {.place = Place::batch, .batch = dice.between(0, 4)};
    if ((call.kind == Kind::apply_all_workers || call.kind == Kind::apply_all_operators ||
         call.kind == Kind::register_data) &&
        dice.chance(0.06))
      call.fault.place = Place::function;
    if (call.fault.place != Place::none && dice.chance(0.7)) call.fault.rank = dice.below(most_ranks);
    program.calls.push_back(call);
    if (call.kind == Kind::destroy || !may_end(call) || play(program).back().compares_state) continue;
    if (dice.chance(0.8))
      open_trainers.erase(open_trainers.begin() + static_cast<std::ptrdiff_t>(place));  // it is unusable
  }
  return program;
}

/// How a start ends.
struct Ending {
  enum class Way { none, kill, raise } way = Way::none;
  enum class Where { before, in_batch, after } where = Where::before;
  int call = 0;
  std::int64_t batch = 0;
  int rank = -1;  ///< -1: all
  std::string file = {};
};

Ending draw_ending(std::uint64_t seed, int start, Ending::Way way, std::size_t calls, int ranks) {
  auto dice = dice_of(seed, 100 + static_cast<std::uint64_t>(start));
  Ending ending;
  if (start >= last_start) return ending;
  ending.way = way;
  ending.where =
      dice.one_of({Ending::Where::before, Ending::Where::in_batch, Ending::Where::in_batch, Ending::Where::after});
  ending.call = dice.below(static_cast<int>(calls));
  ending.batch = dice.between(0, 6);
  ending.rank = way == Ending::Way::raise && dice.chance(0.3) ? -1 : dice.below(ranks);
  return ending;
}

struct Ended : std::runtime_error {
  Ended() : std::runtime_error("ended by the start") {}
};

/// The call under way, and the exception or kill that may come before it or inside its batches.
struct Moment {
  const OperatorCall* call = nullptr;
  const Ending* ending = nullptr;
  int number = 0, rank = 0, workers = 1;

  void end_if(Ending::Where where, std::int64_t batch = 0) const {
    if (ending->way == Ending::Way::none || ending->where != where || ending->call != number ||
        (where == Ending::Where::in_batch && ending->batch != batch) || (ending->rank != -1 && ending->rank != rank))
      return;
    if (ending->way == Ending::Way::raise) throw Ended();
    std::ofstream(ending->file + ".ending") << "kill\n";
    ::raise(SIGKILL);
  }
  void fail_if(Place place, std::int64_t batch = 0) const {
    const auto& fault = call->fault;
    if (fault.place != place || (place == Place::batch && fault.batch != batch)) return;
    if (fault.rank == -1 || fault.rank % workers == rank) throw std::runtime_error("by the program");
  }
};
Moment moment;

class OperatorNetImpl : public torch::nn::Module {
 public:
  explicit OperatorNetImpl(std::vector<at::Tensor> weights) {
    for (auto& weight : weights)
      weights_.push_back(register_parameter("w" + std::to_string(weights_.size()), std::move(weight)));
  }
  at::Tensor forward(const at::Tensor& x) { return operator_output(weights_, x); }
  const std::vector<at::Tensor>& weights() const { return weights_; }

 private:
  std::vector<at::Tensor> weights_;
};

class Trained final : public TrainingOperator {
 public:
  Trained(const OperatorSettings& settings, std::uint64_t seed) : settings_(settings), seed_(seed) {}

  void setup(const Config&) override {
    net_ = std::make_shared<OperatorNetImpl>(operator_weights(settings_, seed_));
    if (settings_.adam)
      add(torch::optim::Adam(net_->parameters(),
                             torch::optim::AdamOptions(settings_.lr).eps(1e-6).weight_decay(settings_.weight_decay)));
    else
      add(torch::optim::SGD(
          net_->parameters(),
          torch::optim::SGDOptions(settings_.lr).momentum(settings_.momentum).weight_decay(settings_.weight_decay)));
    register_data(train_loader(settings_.samples),
                  OperatorLoader(data(operator_inputs(settings_.checked, settings_.widths.front(), 2)),
                                 {.global_batch_size = settings_.checked_batch}));
  }

  void replace_train_data(std::int64_t samples) { register_data(train_loader(samples)); }

  Metrics train_batch(Batch& batch, const BatchInfo& info) override {
    moment.end_if(Ending::Where::in_batch, info.batch_idx);
    moment.fail_if(Place::batch, info.batch_idx);
    auto metrics = TrainingOperator::train_batch(batch, info);
    metrics.emplace("step", static_cast<double>(info.global_step));
    ++seen;
    return metrics;
  }
  Metrics validate_batch(Batch& batch, const BatchInfo& info) override {
    moment.end_if(Ending::Where::in_batch, info.batch_idx);
    moment.fail_if(Place::batch, info.batch_idx);
    auto metrics = TrainingOperator::validate_batch(batch, info);
    const auto positive = batch["y"].masked_select(batch["y"].gt(0));
    Perplexity perplexity;
    if (positive.numel() > 0) perplexity.add(positive.mean(), positive.numel());
    metrics.emplace("perplexity", perplexity);
    // A mean over tokens: a sample has two where its target is positive, else one.
    const auto tokens = batch["y"].gt(0).to(at::kDouble) + 1;
    Mean mean;
    if (tokens.numel() > 0)
      mean.add((batch["y"] * tokens).sum() / tokens.sum(), static_cast<std::int64_t>(tokens.sum().item<double>()));
    metrics.emplace("of_tokens", mean);
    add_of_samples<Accuracy>(metrics, "hits", batch);
    add_of_samples<F1>(metrics, "f1", batch);
    add_of_samples<ConfusionMatrix>(metrics, "confusion", batch);
    add_of_samples<MeanIoU>(metrics, "iou", batch);
    AUC auc;
    if (tokens.numel() > 0) auc.add(batch["y"].select(1, 0), batch["x"].select(1, 0).gt(0).to(at::kLong));
    metrics.emplace("auc", auc);
    return metrics;
  }

  StateDict state_dict() override { return {.values = {{"seen", seen}}}; }
  void load_state_dict(const StateDict& state) override { seen = state.values.at("seen"); }

  double lr() const { return optimizer_->param_groups().front().options().get_lr(); }
  const std::vector<at::Tensor>& weights() const { return net_->weights(); }
  void step_schedule() {
    if (scheduler_) scheduler_->step();
  }
  std::int64_t seen = 0;

 private:
  /// Adds a metric that takes the sign of the target for a prediction of the first input's.
  template <class Metric>
  static void add_of_samples(Metrics& metrics, const char* name, Batch& batch) {
    Metric metric;
    if (batch["y"].numel() > 0)
      metric.add(batch["y"].select(1, 0).gt(0).to(at::kLong), batch["x"].select(1, 0).gt(0).to(at::kLong));
    metrics.emplace(name, metric);
  }

  static Dataset data(const at::Tensor& x) { return Dataset::from_tensors({{"x", x}, {"y", operator_targets(x)}}); }
  OperatorLoader train_loader(std::int64_t samples) const {
    return {data(operator_train_inputs(settings_, samples)),
            {.global_batch_size = settings_.batch, .shuffle = settings_.shuffle}};
  }

  template <class Optimizer>
  void add(Optimizer optimizer) {
    const auto with = [&](auto schedulers) {
      return register_training(Components{.models = net_,
                                          .optimizers = std::move(optimizer),
                                          .criterion = torch::nn::MSELoss(),
                                          .schedulers = std::move(schedulers),
                                          .optimizer_options = {.fuse = settings_.fuse ? Fuse::always : Fuse::never}});
    };
    if (settings_.schedule == Schedule::step) {
      auto registered = with([&](auto& of) {
        return torch::optim::StepLR(of, static_cast<unsigned>(settings_.step_size), settings_.gamma);
      });
      optimizer_ = std::get<1>(registered);
      scheduler_ = std::get<2>(registered);
    } else if (settings_.schedule == Schedule::plateau) {
      using Plateau = torch::optim::ReduceLROnPlateauScheduler;
      optimizer_ = std::get<1>(with([&](auto& of) {
        return Plateau(of, Plateau::min, static_cast<float>(settings_.gamma), static_cast<int>(settings_.patience));
      }));
    } else {
      optimizer_ = std::get<1>(with(std::tuple<>()));
    }
  }

  const OperatorSettings& settings_;
  std::uint64_t seed_;
  std::shared_ptr<OperatorNetImpl> net_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::shared_ptr<torch::optim::StepLR> scheduler_;
};

bool same(double have, double want) { return std::abs(have - want) <= tolerance * (1 + std::abs(want)); }

/// Returns the first difference between two results; empty if there is none.
std::string difference(Json have, const Json& want, bool reduced) {
  if (want.is_null()) return {};
  if (want.is_number()) {  // the result of apply_all_operators()
    if (!have.is_array() || have.empty()) return "gives " + have.dump();
    for (const auto& one : have)
      if (one != want) return "gives " + have.dump() + ", not " + want.dump();
    return {};
  }
  if (!reduced) {  // one object per worker
    if (!have.is_array() || have.empty()) return "gives " + have.dump();
    Json all{{"num_samples", 0}};
    const char* const mean = want.contains("train_loss") ? "train_loss" : "val_loss";
    double sum = 0;
    for (const auto& one : have) {
      all["num_samples"] = all["num_samples"].get<std::int64_t>() + one.at("num_samples").get<std::int64_t>();
      if (!one.at(mean).is_null()) sum += one.at(mean).get<double>() * one.at("num_samples").get<double>();
      if (one.at("batch_count") != want.at("batch_count")) return "gives " + have.dump();
    }
    if (all["num_samples"] != want.at("num_samples")) return "gives " + have.dump();
    const double got = sum / all["num_samples"].get<double>();
    return same(got, want.at(mean)) ? "" : "gives " + have.dump() + ", not " + want.dump();
  }
  have.erase("profile");
  if (have.size() != want.size()) return "gives " + have.dump() + ", not " + want.dump();
  for (const auto& [key, value] : want.items())
    if (!have.contains(key) || have[key].is_number() != value.is_number() ||
        (value.is_number() && !same(have[key], value)) || (value.is_array() && have[key] != value))
      return "has " + key + " in " + have.dump() + ", not in " + want.dump();
  return {};
}

/// One start of a program, on all ranks of a launch.
class Start {
 public:
  Start(Launch& launch, const OperatorProgram& program, const std::vector<OperatorOutcome>& want, const fs::path& files,
        const Ending& ending, bool fresh, bool aloud)
      : launch_(launch), program_(program), want_(want), files_(files), ending_(ending), fresh_(fresh), aloud_(aloud) {}

  void run() {
    if (launch_.rank() == 0) {
      fs::create_directories(files_ / "taken");
      std::ofstream(files_ / "taken" / "chapter") << "years";
    }
    launch_.communicator().barrier();
    moment = {.ending = &ending_, .rank = launch_.rank()};
    moment.workers = launch_.flags().workers.value_or(launch_.size());
    for (std::size_t i = 0; i < program_.calls.size(); ++i) {
      number_ = static_cast<int>(i);
      moment.call = &program_.calls[i];
      moment.number = number_;
      moment.end_if(Ending::Where::before);
      play(program_.calls[i], want_[i]);
      moment.end_if(Ending::Where::after);
    }
    // Compares the state of each trainer that is still usable once more.
    for (auto& [trainer, its] : trainers_) {
      const auto last = last_of(trainer);
      if (want_[last].compares_state) compare_state(*its, want_[last]);
    }
    moment.call = nullptr;
  }

 private:
  using Trainer = OperatorTrainer<Trained>;

  std::size_t last_of(int trainer) const {
    auto last = program_.calls.size() - 1;
    while (program_.calls[last].trainer != trainer) --last;
    return last;
  }

  /// True if this call is the one in which the start ends, on this rank or another one, or comes after it.
  bool ends_now() const { return ending_.way != Ending::Way::none && ending_.call <= number_; }

  void play(const OperatorCall& call, const OperatorOutcome& want) {
    if (aloud_ && launch_.rank() == 0)
      std::fprintf(stderr, "%d: %s of %d%s%s\n", number_, names[static_cast<int>(call.kind)], call.trainer,
                   call.num_steps ? (" for " + std::to_string(*call.num_steps)).c_str() : "",
                   want.error.empty() ? "" : (", which ends with \"" + want.error + "\"").c_str());
    std::string error;
    Json result;
    try {
      result = make(call);
    } catch (const Ended&) {
      throw;
    } catch (const std::exception& thrown) {
      error = thrown.what();
      if (ends_now() && (want.error.empty() || error.find(want.error) == error.npos)) throw;
    }
    if (want.error.empty() != error.empty() || error.find(want.error) == error.npos)
      differ(error.empty() ? "does well, and should end with \"" + want.error + "\""
                           : "ends with \"" + error + "\", and should " +
                                 (want.error.empty() ? "do well" : "with \"" + want.error + "\""));
    if (error.empty())
      if (const auto apart = difference(result, want.result, call.reduce); !apart.empty()) differ(apart);
    if (fresh_ && want.compares_state) compare_weights(*trainers_.at(call.trainer), want);
  }

  Json make(const OperatorCall& call) {
    if (call.kind == Kind::make) {
      const auto seed = static_cast<std::uint64_t>(call.trainer + 1) * 1000;
      OperatorTrainerOptions options{.num_workers = launch_.size()};
      if (program_.settings.schedule != Schedule::none)
        options.scheduler_step_freq = static_cast<SchedulerStepFreq>(program_.settings.steps);
      trainers_[call.trainer] = std::make_unique<Trainer>(
          launch_, [&, seed] { return std::make_unique<Trained>(program_.settings, seed); }, options);
      return {};
    }
    auto& trainer = *trainers_.at(call.trainer);
    switch (call.kind) {
      case Kind::train:
        return trainer.train({.num_steps = call.num_steps,
                              .profile = call.profile,
                              .reduce_results = call.reduce,
                              .max_retries = call.max_retries});
      case Kind::validate:
        return trainer.validate({.num_steps = call.num_steps, .profile = call.profile, .reduce_results = call.reduce});
      case Kind::save:
        return trainer.save(call.which == -1 ? file(number_) : files_ / "taken"), Json();
      case Kind::load:
        return trainer.load(call.which == -1 ? files_ / "nowhere" : file(call.which)), Json();
      case Kind::state_dict:
        return states_[number_] = trainer.state_dict(), Json();
      case Kind::load_state_dict: {
        if (const auto known = states_.find(call.which); known != states_.end())
          return trainer.load_state_dict(known->second), Json();
        auto wrong = trainer.state_dict();
        wrong.tensors["model/w0"] = at::zeros({77, 1}, at::kDouble);
        return trainer.load_state_dict(wrong), Json();
      }
      case Kind::update_scheduler:
        return trainer.update_scheduler(call.metric + (launch_.rank() == 0 ? 0 : 100)), Json();
      case Kind::apply_all_workers: {
        const auto all = trainer.apply_all_workers([&] { return moment.fail_if(Place::function), Json(5); });
        if (all.size() != static_cast<std::size_t>(moment.workers)) differ("gives " + all.dump());
        return {};
      }
      case Kind::apply_all_operators:
        return trainer.apply_all_operators([&](Trained& its) {
          moment.fail_if(Place::function);
          its.seen += 7;
          its.step_schedule();
          return Json(its.seen);
        });
      case Kind::register_data:
        return trainer.apply_all_operators([&](Trained& its) {
          moment.fail_if(Place::function);
          its.replace_train_data(call.samples);
          return Json(call.samples);
        });
      case Kind::shutdown:
        return trainer.shutdown(), Json();
      case Kind::forced_shutdown:
        return trainer.shutdown(true), Json();
      default:
        return trainers_.erase(call.trainer), Json();
    }
  }

  fs::path file(int call) const { return files_ / ("save_" + std::to_string(call)); }

  void compare_weights(Trainer& trainer, const OperatorOutcome& want) {
    if (launch_.rank() >= moment.workers) return;
    const at::NoGradGuard no_grad;
    auto& its = trainer.get_local_operator();
    for (std::size_t i = 0; i < want.weights.size(); ++i)
      compare("w" + std::to_string(i), its.weights()[i], want.weights[i]);
    if (!same(its.lr(), want.lr)) differ("has lr " + std::to_string(its.lr()) + ", not " + std::to_string(want.lr));
    if (its.seen != want.seen || its.global_step != want.global_step)
      differ("has seen " + std::to_string(its.seen) + " in step " + std::to_string(its.global_step) + ", not " +
             std::to_string(want.seen) + " in " + std::to_string(want.global_step));
  }

  void compare_state(Trainer& trainer, const OperatorOutcome& want) {
    compare_weights(trainer, want);
    const auto state = trainer.state_dict();
    for (std::size_t i = 0; i < want.weights.size(); ++i)
      compare("w" + std::to_string(i), state.tensors.at("model/w" + std::to_string(i)), want.weights[i]);
    const Json progress{{"epochs", want.epochs}, {"global_step", want.global_step}};
    for (const auto& [key, value] : progress.items())
      if (state.values.at("progress").at(key) != value) differ("has " + state.values.at("progress").dump());
  }

  void compare(const std::string& name, const at::Tensor& have, const at::Tensor& want) const {
    const auto apart = ((have - want).abs() / (want.abs() + 1)).max().item<double>();
    if (!(apart <= tolerance)) differ("leaves " + name + " apart by " + Json(apart).dump());
  }

  [[noreturn]] void differ(const std::string& how) const {
    throw std::logic_error("call " + std::to_string(number_) + ", " +
                           names[static_cast<int>(program_.calls[static_cast<std::size_t>(number_)].kind)] + " of " +
                           std::to_string(program_.calls[static_cast<std::size_t>(number_)].trainer) + ", " + how);
  }

  Launch& launch_;
  const OperatorProgram& program_;
  const std::vector<OperatorOutcome>& want_;
  const fs::path& files_;
  const Ending& ending_;
  const bool fresh_, aloud_;
  int number_ = 0;
  std::map<int, std::unique_ptr<Trainer>> trainers_;
  std::map<int, StateDict> states_;
};

/// Runs all starts of a program. Returns the first difference from the model on any rank; empty if there is none.
/// Collective.
std::string play_all_starts(std::uint64_t seed, const Communicator& world, const fs::path& folder, bool aloud) {
  auto dice = dice_of(seed, 7);
  const bool again = dice.chance(0.5);
  const auto program = draw(seed, again);
  const auto want = play(program);
  std::string differs;
  for (int start = again ? 1 : last_start; start <= last_start; ++start) {
    const int workers = again || dice.chance(0.3) ? dice.between(1, world.size()) : world.size();
    const auto ending = draw_ending(seed, start, Ending::Way::raise, program.calls.size(), workers);
    std::vector<std::string> words{"operators",
                                   "--storage",
                                   (folder / "runs").string(),
                                   "--progress",
                                   "none",
                                   "--log-level",
                                   aloud ? "info" : "off",
                                   "--workers",
                                   std::to_string(workers)};
    if (again) words.insert(words.end(), {"--name", "program"});
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    std::string here;
    int code = 0;
    {
      Launch launch(static_cast<int>(argv.size()), argv.data());
      code = launch.run([&] {
        try {
          Start(launch, program, want, folder / "files", ending, !again || start == 1, aloud).run();
        } catch (const std::logic_error& error) {
          here = error.what();
          throw;
        }
      });
    }
    for (const auto& theirs : world.all_gather(here))
      if (differs.empty()) differs = theirs;
    if (!differs.empty()) return "in start " + std::to_string(start) + " " + differs;
    if (code == 0) break;
    if (ending.way == Ending::Way::none) return "in the last start, which ends with " + std::to_string(code);
  }
  return {};
}

/// One start of a program whose ranks are killed.
int play_one_start(int argc, char** argv) {
  Launch launch(argc, argv);
  std::uint64_t seed = 1;
  int start = 1;
  std::string file;
  launch.app().add_option("--killed", seed);
  launch.app().add_option("--start", start);
  launch.app().add_option("--ending", file);
  return launch.run([&] {
    const auto program = draw(seed, true);
    const auto want = play(program);
    auto ending = draw_ending(seed, start, Ending::Way::kill, program.calls.size(), launch.size());
    ending.file = file;
    Start(launch, program, want, *launch.flags().storage / "files", ending, start == 1, false).run();
    if (launch.rank() == 0) std::ofstream(file + ".compared") << program.calls.size() << '\n';
  });
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  for (int i = 1; i < argc; ++i)
    if (std::string_view(argv[i]) == "--killed") return soak::play_one_start(argc, argv);
  return soak::drive(argc, argv, "operators", [](const Communicator& world) {
    return [&world](const soak::Round& round) {
      return soak::play_all_starts(round.seed, world, round.folder, round.aloud);
    };
  });
}
