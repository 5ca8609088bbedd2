#include "soak/operator_model.hpp"

#include "data/passes/samples.hpp"
#include "soak/net.hpp"

#include <torch/autograd.h>

#include <cmath>
#include <stdexcept>
#include <vector>

namespace muster::soak {
namespace {

using Json = nlohmann::json;
using Kind = OperatorCall::Kind;
using Schedule = OperatorSettings::Schedule;
using Steps = OperatorSettings::Steps;

/// Thrown if a call must fail. `part` is a part of the expected message.
struct Failed {
  std::string part;
  bool ends = true;  ///< true if the trainer cannot be used afterwards
};

/// Everything that is saved.
struct ModelState {
  std::vector<at::Tensor> weights, first, second;  ///< first and second: the moments
  std::int64_t updates = 0;
  double lr = 0;
  std::int64_t scheduled = 0;  ///< steps of StepLR
  double best = std::numeric_limits<double>::infinity();
  std::int64_t bad = 0;
  std::int64_t epochs = 0, global_step = 0, seen = 0;

  ModelState copy() const {
    auto other = *this;
    for (auto* all : {&other.weights, &other.first, &other.second})
      for (auto& tensor : *all) tensor = tensor.clone();
    return other;
  }
};

/// The mean over samples, and the last value.
struct Meter {
  double sum = 0, last = 0;
  void add(double value, std::int64_t samples) { sum += value * static_cast<double>(samples), last = value; }
};

/// Of some samples: what a mean over tokens and the metrics of classification.hpp are computed of.
struct Counts {
  double tokens = 0, of_tokens = 0;
  double samples[2][2] = {};      ///< by class and predicted class
  std::vector<double> scores[2];  ///< by class
  void add(const Counts& other) {
    tokens += other.tokens, of_tokens += other.of_tokens;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) samples[i][j] += other.samples[i][j];
      scores[i].insert(scores[i].end(), other.scores[i].begin(), other.scores[i].end());
    }
  }
  /// In class i or taken for it.
  double either(int i) const { return samples[i][i] + samples[i][1 - i] + samples[1 - i][i]; }
  Json hits() const {
    const auto right = samples[0][0] + samples[1][1], wrong = samples[0][1] + samples[1][0];
    return right + wrong > 0 ? Json(right / (right + wrong)) : Json();
  }
  Json f1() const { return either(1) > 0 ? Json(2 * samples[1][1] / (samples[1][1] + either(1))) : Json(); }
  Json iou() const {
    double sum = 0, classes = 0;
    for (int i = 0; i < 2; ++i)
      if (either(i) > 0) sum += samples[i][i] / either(i), ++classes;
    return classes > 0 ? Json(sum / classes) : Json();
  }
  Json confusion() const {
    return Json::array({Json::array({samples[0][0], samples[0][1]}), Json::array({samples[1][0], samples[1][1]})});
  }
  Json auc() const {
    if (scores[0].empty() || scores[1].empty()) return {};
    double larger = 0;
    for (const double one : scores[1])
      for (const double zero : scores[0]) larger += one > zero ? 1 : one == zero ? 0.5 : 0;
    return larger / static_cast<double>(scores[0].size() * scores[1].size());
  }
};

/// A sample has two tokens where its target is positive, else one. Its class is the sign of the first input, which is
/// predicted by the target's sign, or for the AUC by the target itself.
Counts counts_of(const at::Tensor& x, const at::Tensor& y) {
  const auto tokens = y.gt(0).to(at::kDouble) + 1;
  Counts counts{.tokens = tokens.sum().item<double>(), .of_tokens = (y * tokens).sum().item<double>()};
  for (std::int64_t i = 0; i < x.size(0); ++i) {
    const auto score = y[i][0].item<double>();
    const int its_class = x[i][0].item<double>() > 0 ? 1 : 0;
    ++counts.samples[its_class][score > 0 ? 1 : 0];
    counts.scores[its_class].push_back(score);
  }
  return counts;
}

class ModelTrainer {
 public:
  ModelTrainer(const OperatorSettings& settings, std::uint64_t seed) : settings_(settings) {
    state_.weights = operator_weights(settings, seed);
    for (const auto& weight : state_.weights) {
      state_.first.push_back(at::zeros_like(weight));
      state_.second.push_back(at::zeros_like(weight));
    }
    state_.lr = settings.lr;
    x_ = operator_train_inputs(settings, settings.samples);
    checked_x_ = operator_inputs(settings.checked, settings.widths.front(), 2);
  }

  Json train(const OperatorCall& call) {
    require_open();
    if (call.max_retries < 0) throw Failed{"max_retries is", false};
    check_steps(call);
    Meter loss, step;
    std::int64_t samples = 0, batches = 0;
    while (call.num_steps ? batches < *call.num_steps : batches == 0 || taken_ < settings_.batches(x_.size(0))) {
      if (!open_ || taken_ == settings_.batches(x_.size(0))) {
        ++state_.epochs;
        taken_ = 0;
        open_ = true;
      }
      if (call.fault.place == OperatorFault::Place::batch && call.fault.batch == batches)
        throw Failed{"by the program"};
      const auto rows = rows_of(taken_, x_.size(0), settings_.batch);
      const auto order = order_of_pass();
      loss.add(update(order.slice(0, rows.first, rows.second)), rows.second - rows.first);
      step.add(static_cast<double>(state_.global_step), rows.second - rows.first);
      samples += rows.second - rows.first;
      ++taken_, ++batches, ++state_.global_step, ++state_.seen;
      if (settings_.steps == Steps::batch) step_schedule();
    }
    if (!call.num_steps) open_ = false;
    if (settings_.steps == Steps::epoch) step_schedule();
    const auto all = static_cast<double>(samples);
    return {{"num_samples", samples},       {"batch_count", batches},       {"epoch", state_.epochs},
            {"train_loss", loss.sum / all}, {"last_train_loss", loss.last}, {"step", step.sum / all},
            {"last_step", step.last}};
  }

  Json validate(const OperatorCall& call) {
    require_open();
    check_steps(call);
    Meter loss;
    double positive = 0, positives = 0;
    Counts counts, last_counts;
    Json last;
    std::int64_t samples = 0, batches = 0;
    for (; batches < std::min(call.num_steps.value_or(settings_.checked_batches()), settings_.checked_batches());
         ++batches) {
      if (call.fault.place == OperatorFault::Place::batch && call.fault.batch == batches)
        throw Failed{"by the program"};
      const auto rows = rows_of(batches, settings_.checked, settings_.checked_batch);
      const auto x = checked_x_.slice(0, rows.first, rows.second);
      const at::NoGradGuard no_grad;
      const auto y = operator_targets(x);
      loss.add((operator_output(state_.weights, x) - y).square().mean().item<double>(), x.size(0));
      samples += x.size(0);
      const auto sum = y.clamp_min(0).sum().item<double>(), count = y.gt(0).sum().item<double>();
      positive += sum;
      positives += count;
      last = count > 0 ? Json(std::exp(sum / count)) : Json();
      last_counts = counts_of(x, y);
      counts.add(last_counts);
    }
    return {{"perplexity", positives > 0 ? Json(std::exp(positive / positives)) : Json()},
            {"last_perplexity", last},
            {"of_tokens", counts.of_tokens / counts.tokens},
            {"last_of_tokens", last_counts.of_tokens / last_counts.tokens},
            {"hits", counts.hits()},
            {"last_hits", last_counts.hits()},
            {"f1", counts.f1()},
            {"last_f1", last_counts.f1()},
            {"iou", counts.iou()},
            {"last_iou", last_counts.iou()},
            {"confusion", counts.confusion()},
            {"last_confusion", last_counts.confusion()},
            {"auc", counts.auc()},
            {"last_auc", last_counts.auc()},
            {"num_samples", samples},
            {"batch_count", batches},
            {"val_loss", loss.sum / static_cast<double>(samples)},
            {"last_val_loss", loss.last},
            {"val_accuracy", nullptr},
            {"last_val_accuracy", nullptr}};
  }

  void update_scheduler(double metric) {
    require_open();
    if (settings_.schedule != Schedule::plateau) throw Failed{"no registered scheduler takes a metric", false};
    const double value = static_cast<float>(metric);
    if (value < state_.best * (1 - 1e-4)) {
      state_.best = value;
      state_.bad = 0;
    } else {
      ++state_.bad;
    }
    if (state_.bad > settings_.patience) {
      if (state_.lr - state_.lr * settings_.gamma > 1e-8) state_.lr *= settings_.gamma;
      state_.bad = 0;
    }
  }

  Json apply_operators(const OperatorCall& call) {
    require_open();
    if (call.fault.place == OperatorFault::Place::function) throw Failed{"by the program"};
    state_.seen += 7;
    step_schedule();
    return state_.seen;
  }

  Json register_data(const OperatorCall& call) {
    require_open();
    if (call.fault.place == OperatorFault::Place::function) throw Failed{"by the program"};
    x_ = operator_train_inputs(settings_, call.samples);
    open_ = false;
    return call.samples;
  }

  void apply_workers(const OperatorCall& call) const {
    require_open();
    if (call.fault.place == OperatorFault::Place::function) throw Failed{"by the program"};
  }

  ModelState save() const {
    require_open();
    return state_.copy();
  }
  void load(const ModelState* state, const std::string& part) {
    require_open();
    if (state == nullptr) throw Failed{part, false};
    state_ = state->copy();
    open_ = false;
  }
  void require_open() const {
    if (!is_open) throw Failed{"it is shut down, or has ended with an error", false};
  }

  bool is_open = true;
  const ModelState& state() const { return state_; }

 private:
  static std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t batch, std::int64_t rows, std::int64_t size) {
    return {batch * size, std::min(rows, (batch + 1) * size)};
  }
  static void check_steps(const OperatorCall& call) {
    if (call.num_steps.value_or(1) < 1) throw Failed{"num_steps is " + std::to_string(*call.num_steps), false};
  }
  /// The samples of the pass under way. The model uses only one function of muster: the one that shuffles.
  at::Tensor order_of_pass() const {
    const auto count = x_.size(0);
    constexpr std::uint64_t seed = 0xdee795a6c5087209u;  // FNV-1a of the dataset's name
    const detail::data::Order order(count, {.shuffle = settings_.shuffle, .seed = seed, .epoch = state_.epochs - 1});
    auto rows = at::empty({count}, at::kLong);
    for (std::int64_t i = 0; i < count; ++i) rows.data_ptr<std::int64_t>()[i] = order(i);
    return rows;
  }

  /// Steps the optimizer over these samples. Returns the loss before the step.
  double update(const at::Tensor& rows) {
    const auto x = x_.index_select(0, rows);
    std::vector<at::Tensor> leaves;
    for (const auto& weight : state_.weights) leaves.push_back(weight.detach().clone().requires_grad_());
    const auto loss = (operator_output(leaves, x) - operator_targets(x)).square().mean();
    const auto gradients = torch::autograd::grad({loss}, leaves);
    const at::NoGradGuard no_grad;
    ++state_.updates;
    const auto t = static_cast<double>(state_.updates);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      auto& weight = state_.weights[i];
      auto& m = state_.first[i];
      auto& v = state_.second[i];
      const auto g = gradients[i] + settings_.weight_decay * weight;
      if (settings_.adam) {
        m = 0.9 * m + 0.1 * g;
        v = 0.999 * v + 0.001 * g * g;
        weight =
            weight - state_.lr / (1 - std::pow(0.9, t)) * m / (v.sqrt() / std::sqrt(1 - std::pow(0.999, t)) + 1e-6);
      } else {
        m = state_.updates == 1 ? g : settings_.momentum * m + g;
        weight = weight - state_.lr * (settings_.momentum > 0 ? m : g);
      }
    }
    return loss.item<double>();
  }

  void step_schedule() {
    if (settings_.schedule == Schedule::step && ++state_.scheduled % settings_.step_size == 0)
      state_.lr *= settings_.gamma;
  }

  const OperatorSettings& settings_;
  ModelState state_;
  at::Tensor x_, checked_x_;
  bool open_ = false;  ///< true while a pass is under way
  std::int64_t taken_ = 0;
};

}  // namespace

at::Tensor operator_inputs(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  return numbers({rows, columns}, seed);
}

at::Tensor operator_train_inputs(const OperatorSettings& settings, std::int64_t rows) {
  return operator_inputs(rows, settings.widths.front(), 3 + static_cast<std::uint64_t>(rows));
}

at::Tensor operator_targets(const at::Tensor& inputs) { return at::sin(inputs.sum(1, /*keepdim=*/true) * 2); }

std::vector<at::Tensor> operator_weights(const OperatorSettings& settings, std::uint64_t seed) {
  std::vector<at::Tensor> weights;
  for (std::size_t i = 1; i < settings.widths.size(); ++i) {
    const auto in = settings.widths[i - 1], out = settings.widths[i];
    weights.push_back(numbers({out, in}, ++seed) * (1.5 / std::sqrt(static_cast<double>(in))));
    weights.push_back(numbers({out}, ++seed) * 0.5);
  }
  return weights;
}

at::Tensor operator_output(const std::vector<at::Tensor>& weights, at::Tensor x) {
  for (std::size_t i = 0; i < weights.size(); i += 2) {
    x = at::linear(x, weights[i], weights[i + 1]);
    if (i + 2 < weights.size()) x = at::tanh(x);
  }
  return x;
}

std::vector<OperatorOutcome> play(const OperatorProgram& program) {
  std::map<int, ModelTrainer> trainers;
  std::map<int, ModelState> saved;  // by the number of the call that saved it
  std::vector<OperatorOutcome> outcomes;
  for (std::size_t number = 0; number < program.calls.size(); ++number) {
    const auto& call = program.calls[number];
    if (call.kind == Kind::make)
      trainers.try_emplace(call.trainer, program.settings, static_cast<std::uint64_t>(call.trainer + 1) * 1000);
    auto& trainer = trainers.at(call.trainer);
    const auto found = saved.find(call.which);
    const auto* const state = found == saved.end() ? nullptr : &found->second;
    auto& outcome = outcomes.emplace_back();
    try {
      switch (call.kind) {
        case Kind::make:
          break;
        case Kind::train:
          outcome.result = trainer.train(call);
          break;
        case Kind::validate:
          outcome.result = trainer.validate(call);
          break;
        case Kind::save:
          if (call.which == -1) {
            saved.insert_or_assign(static_cast<int>(number), trainer.save());
          } else {
            trainer.require_open();
            throw Failed{"it exists and is not a checkpoint", false};
          }
          break;
        case Kind::state_dict:
          saved.insert_or_assign(static_cast<int>(number), trainer.save());
          break;
        case Kind::load:
          trainer.load(state, call.which == -1 ? "nowhere" : "save_" + std::to_string(call.which));
          break;
        case Kind::load_state_dict:
          trainer.load(state, "model/");
          break;
        case Kind::update_scheduler:
          trainer.update_scheduler(call.metric);
          break;
        case Kind::apply_all_workers:
          trainer.apply_workers(call);
          break;
        case Kind::apply_all_operators:
          outcome.result = trainer.apply_operators(call);
          break;
        case Kind::register_data:
          outcome.result = trainer.register_data(call);
          break;
        case Kind::shutdown:
        case Kind::forced_shutdown:
        case Kind::destroy:
          trainer.is_open = false;
          break;
      }
    } catch (const Failed& failed) {
      outcome.error = failed.part;
      if (failed.ends) trainer.is_open = false;
    }
    if (!trainer.is_open) continue;
    const auto& now = trainer.state();
    outcome.compares_state = true;
    for (const auto& weight : now.weights) outcome.weights.push_back(weight.clone());
    outcome.epochs = now.epochs, outcome.global_step = now.global_step, outcome.seen = now.seen, outcome.lr = now.lr;
  }
  return outcomes;
}

}  // namespace muster::soak
