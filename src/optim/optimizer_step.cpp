#include "optim/optimizer_step.hpp"

#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "gradients/hooks.hpp"
#include "gradients/prepared_model.hpp"
#include "gradients/reducer.hpp"
#include "gradients/shared_exchange.hpp"
#include "gradients/tensor_changes.hpp"
#include "muster/error.hpp"
#include "optim/fused_step.hpp"
#include "optim/sum_of_squares.hpp"
#include "watch/trace.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace muster::detail::optim {
namespace {

/// With fewer bytes of parameters than this, fusing gains nothing, since they stay in the processor's caches.
constexpr std::size_t least_bytes = std::size_t{16} << 20;

std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

std::set<const void*> identities(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> identities;
  for (const auto& tensor : tensors) identities.insert(tensor.unsafeGetTensorImpl());
  return identities;
}

/// Removes repeated parameters: if a model uses a weight in two places, parameters() lists it twice.
void drop_repeated(torch::optim::Optimizer& optimizer) {
  std::set<const void*> known;
  for (auto& group : optimizer.param_groups())
    std::erase_if(group.params(),
                  [&](const at::Tensor& parameter) { return !known.insert(parameter.unsafeGetTensorImpl()).second; });
}

using Models = std::vector<std::shared_ptr<gradients::PreparedModel>>;

/// Checks an optimizer's gradients for NaN and infinite numbers, and tells the session's BadNumberPolicy.
class Numbers {
 public:
  Numbers(std::shared_ptr<BadNumberPolicy> watch, int optimizer, const Models& models)
      : watch_(std::move(watch)), optimizer_(optimizer) {
    if (!watch_) return;
    for (const auto& model : models)
      if (const auto reducer = model->reducer()) {
        reducer->watch_numbers();
        reducers_.push_back(reducer);
      }
  }

  bool watched() const noexcept { return watch_ != nullptr; }
  std::int64_t skipped() const noexcept { return skipped_; }
  /// Returns how a fused step must check the averages. Call it once for each step.
  FusedStep::NumberCheck begin_fused() {
    if (!watch_) return FusedStep::NumberCheck::none;
    if (!watch_->begin_step(optimizer_)) return ++skipped_, FusedStep::NumberCheck::without_step;
    return watch_->always_throws() ? FusedStep::NumberCheck::during_step : FusedStep::NumberCheck::before_step;
  }
  void end_fused(FusedStep::NumberCheck check, const FusedStep::StepResult& stepped,
                 const std::vector<at::Tensor>& parameters) {
    if (!watch_ || check == FusedStep::NumberCheck::without_step) return;
    if (!stepped.has_bad_number) return watch_->note_good_step(optimizer_);
    const auto own = name_of_bad(parameters);
    tell(own, own, /*together=*/true);
  }
  /// True if the step may be taken, by the averages in .grad. `norm`: the norm of the averages, if it is known.
  bool allow(const std::vector<at::Tensor>& parameters, std::optional<double> norm) {
    if (!watch_) return true;
    if (!watch_->begin_step(optimizer_)) return ++skipped_, false;
    const bool together = std::ranges::none_of(reducers_, [](const auto& weak) {
      const auto reducer = weak.lock();
      return reducer && reducer->is_joined();
    });
    const auto where = norm && std::isfinite(*norm) ? std::string() : name_of_bad(parameters);
    bool bad = !where.empty();
    if (!averages_all(parameters)) {
      if (!together)
        throw Error(ExitCode::usage, "looking for bad numbers inside join()",
                    "the optimizer has parameters whose gradients are not averaged",
                    "Give them an optimizer of their own, which is not prepared");
      bad = watch_->any_rank(bad);
    }
    if (!bad) {
      // With virtual workers, there are no averages before a step's last batch.
      if (std::ranges::any_of(parameters, [](const auto& p) { return p.grad().defined(); }))
        watch_->note_good_step(optimizer_);
      return true;
    }
    std::string own;
    for (const auto& weak : reducers_)
      if (const auto reducer = weak.lock(); reducer && own.empty()) own = reducer->bad_gradient();
    tell(where, own, together);
    return false;
  }

 private:
  void tell(const std::string& where, const std::string& own, bool together) {
    ++skipped_;
    watch_->note_bad_gradient(optimizer_, where, own, together);
  }
  /// Returns the name of the first parameter whose .grad is not finite; empty if all are finite.
  std::string name_of_bad(const std::vector<at::Tensor>& parameters) const {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& gradient = parameters[i].grad();
      if (!gradient.defined() || gradients::all_finite(gradient)) continue;
      for (const auto& weak : reducers_)
        if (const auto reducer = weak.lock())
          if (auto name = reducer->name_of(parameters[i]); !name.empty()) return name;
      return str("number ", i, " of the optimizer");
    }
    return {};
  }
  bool averages_all(const std::vector<at::Tensor>& parameters) {
    if (parameters.size() != checked_count_) {
      checked_count_ = parameters.size();
      averages_all_ = std::ranges::all_of(parameters, [&](const at::Tensor& parameter) {
        return std::ranges::any_of(reducers_, [&](const auto& weak) {
          const auto reducer = weak.lock();
          return reducer && reducer->averages(parameter);
        });
      });
    }
    return averages_all_;
  }

  std::shared_ptr<BadNumberPolicy> watch_;  ///< null if bad numbers are ignored
  int optimizer_;
  std::vector<std::weak_ptr<gradients::Reducer>> reducers_;
  std::int64_t skipped_ = 0;
  std::size_t checked_count_ = 0;  ///< number of parameters for which averages_all_ was computed
  bool averages_all_ = true;
};

/// Returns the values of all gradients; of a sparse gradient, the values of its summed rows, since the norm is defined
/// by these.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.coalesce();
    values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  return values;
}

/// Sums the squares piece by piece, so that the bits of the sum do not depend on the number of threads.
template <class T>
double squares_in_pieces(const at::Tensor& dense) {
  constexpr std::int64_t piece = 1 << 16;
  const auto* const values = static_cast<const T*>(dense.const_data_ptr());
  std::vector<double> sums(static_cast<std::size_t>((dense.numel() + piece - 1) / piece));
  at::parallel_for(0, std::ssize(sums), 1, [&](std::int64_t begin, std::int64_t end) {
    for (auto i = begin; i < end; ++i)
      sums[static_cast<std::size_t>(i)] =
          sum_of_squares(values + i * piece, static_cast<std::size_t>(std::min(piece, dense.numel() - i * piece)));
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

double squares_of(const at::Tensor& values) {
  if (values.is_cpu() && values.is_non_overlapping_and_dense() && !values.is_neg()) {
    if (values.scalar_type() == at::kFloat) return squares_in_pieces<float>(values);
    if (values.scalar_type() == at::kDouble) return squares_in_pieces<double>(values);
  }
  const auto real = values.is_complex() ? at::view_as_real(values.resolve_conj()) : values;
  return std::pow(at::linalg_vector_norm(real, 2, {}, false, at::kDouble).item<double>(), 2);
}

/// Returns the 2-norm of all gradients together, in double precision as in a fused step: in floats, squares overflow
/// from 1.8e19 on.
double norm_of(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  double squares = 0;
  for (const auto& values : gradients) squares += squares_of(values);
  return std::sqrt(squares);
}

/// Scales gradients whose norm is `norm` down to `max_norm`, as torch's clip_grad_norm_() does.
void scale_down(const std::vector<at::Tensor>& gradients, double norm, double max_norm) {
  const double scale = std::min(max_norm / (norm + 1e-6), 1.0);
  if (scale == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& values : gradients) values.data().mul_(scale);
}

/// Makes autograd count the step as a write to the parameters. torch's own steps write through .data(), so backward()
/// would not notice that the weights have changed since the graph was made.
void count_writes(const torch::optim::Optimizer& optimizer) {
  for (const auto& parameter : parameters_of(optimizer))
    if (parameter.grad().defined() && !parameter.is_inference()) torch::autograd::impl::bump_version(parameter);
}

/// True if another tensor uses the parameter's memory, such as another parameter, a view or the result of detach().
/// Fusing would give the parameter other memory, and the two tensors would no longer share their values.
bool shares_memory(const at::Tensor& parameter) { return parameter.storage().use_count() > 1; }

/// Returns the index of the first parameter whose bits are not the same on all ranks. Collective.
std::optional<std::size_t> first_unequal(const Communicator& communicator, const std::vector<at::Tensor>& parameters) {
  std::string mine;
  for (const auto& parameter : parameters) {
    const auto hash = gradients::hash_of(parameter.const_data_ptr(), parameter.nbytes());
    mine.append(reinterpret_cast<const char*>(&hash), sizeof hash);
  }
  const auto of_ranks = communicator.all_gather(mine);
  std::size_t first = mine.size();
  for (const auto& other : of_ranks)
    first = std::min<std::size_t>(first, std::ranges::mismatch(other, of_ranks[0]).in1 - other.begin());
  if (first == mine.size()) return std::nullopt;
  return first / sizeof(std::uint64_t);
}

class Step final : public OptimizerStep, public SnapshotSource, public gradients::FusedOptimizer {
 public:
  /// `model`: the prepared model whose parameters the optimizer steps; null if there is none. `evaluates`: true if
  /// step() of the optimizer may call its closure more than once.
  Step(const std::shared_ptr<gradients::PreparedModel>& model, const OptimizerOptions& options, bool evaluates,
       Numbers numbers, const SharedOptimizerData& shared)
      : model_(model),
        reducer_(model ? model->reducer() : nullptr),
        options_(options),
        evaluates_(evaluates),
        numbers_(std::move(numbers)),
        snapshot_sources_(shared.snapshot_sources),
        last_rates_(shared.last_rates),
        rates_number_(last_rates_ ? last_rates_->size() : 0) {
    if (snapshot_sources_) snapshot_sources_->push_back(this);
    if (last_rates_) last_rates_->emplace_back();
  }
  ~Step() override {
    if (snapshot_sources_) std::erase(*snapshot_sources_, this);
    if (last_rates_) (*last_rates_)[rates_number_].clear();
    fused_.reset();  // so that on_unfused() finds nothing to do
    if (const auto reducer = reducer_.lock(); reducer && reducer->is_fused_with(this)) reducer->set_fused(nullptr);
  }

  /// Fuses this optimizer, instead of any other, if its present options and the reducer's exchange allow it.
  /// Collective.
  void fuse(torch::optim::Optimizer& optimizer) {
    if (fused_) fused_->release(optimizer);
    fused_.reset();
    gradients::note_optimizer(parameters_of(optimizer), lifetime_);
    const auto reducer = reducer_.lock();
    if (!reducer) return;
    if (reducer->is_fused_with(this)) reducer->set_fused(nullptr);
    const auto gradients = options_.fuse == Fuse::never ? nullptr : reducer->fusable();
    const int states = state_tensor_count(optimizer);
    if (gradients && states >= 0) {
      auto parameters = reducer->dense_parameters();
      std::size_t bytes = 0;
      for (const auto& parameter : parameters) bytes += parameter.nbytes();
      const bool one_node = gradients->communicator().topology().num_nodes == 1;
      const bool gains = options_.fuse == Fuse::always || (bytes >= least_bytes && one_node);
      if (gains && owns(optimizer, parameters) && FusedStep::fits(parameters)) {
        // A fused optimizer's views of the parameters must go before shares_memory() looks.
        reducer->set_fused(nullptr);
        const auto& communicator = gradients->communicator();
        const bool alone = std::ranges::none_of(parameters, shares_memory);
        if (communicator.all_reduce(std::int64_t{alone}, ReduceOp::min) != 0) {
          if (const auto unequal = first_unequal(communicator, parameters))
            throw Error(ExitCode::user_error, "fusing an optimizer with the averaging of gradients",
                        "parameter " + reducer->name_of(parameters[*unequal]) + " is not the same on all ranks",
                        "Change parameters in the same way on all ranks, and step them only by prepared optimizers");
          fused_ = FusedStep::make(*gradients, std::move(parameters), states, snapshot_sources_ != nullptr);
        }
      }
    }
    gradients_ = gradients;
    if (fused_) reducer->set_fused(this);
  }

  at::Tensor step(torch::optim::Optimizer& optimizer, const Closure& closure,
                  const std::function<at::Tensor(Closure)>& plain) override {
    const watch::TraceSpan span("optimizer");
    note_rates(optimizer);
    const auto counted = [&](Closure own) {
      auto made = plain(std::move(own));
      count_writes(optimizer);
      return made;
    };
    const auto loss = closure && evaluates_ ? step_by_evaluations(optimizer, closure, counted)
                                            : step_once(optimizer, closure, counted);
    gradients::note_step(parameters_of(optimizer), lifetime_);
    return loss;
  }

  void average_gradients(torch::optim::Optimizer& optimizer) override {
    gradients::fetch_averages(parameters_of(optimizer));
  }

  // The optimizer's state stays where it is, in this rank's private mapping of the shared copy. Without fused steps no
  // other rank writes to that copy any more.
  void on_unfused() override {
    gather_state();
    fused_.reset();
  }
  void on_second_round() override {
    if (fused_ && !gradients_.expired()) fused_->note_written();
  }

  void gather_state() override {
    if (fused_) fused_->gather_state();
  }
  double grad_norm() const noexcept override { return grad_norm_; }
  bool fused() const noexcept override { return fused_ != nullptr; }
  std::int64_t skipped_steps() const noexcept override { return numbers_.skipped(); }
  std::optional<MemorySnapshot> take_snapshot() override {
    return fused_ && !gradients_.expired() ? fused_->take_snapshot() : std::nullopt;
  }

 private:
  void note_rates(const torch::optim::Optimizer& optimizer) {
    if (!last_rates_ || model_.expired()) return;
    auto& rates = (*last_rates_)[rates_number_];
    rates = {static_cast<double>(++steps_)};
    try {
      for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
    } catch (const c10::Error&) {  // a user's type of options, without a learning rate
      rates.clear();
      last_rates_.reset();
    }
  }

  at::Tensor step_once(torch::optim::Optimizer& optimizer, const Closure& closure,
                       const std::function<at::Tensor(Closure)>& plain) {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode grad(true);
      loss = closure();
    }
    const auto reducer = reducer_.lock();
    if (fused_ && reducer) {
      reducer->check_shapes();                                          // the fused step relies on them
      if (!reducer->awaits_step()) reducer->finish_abandoned_rounds();  // may make a new exchange
      reducer->average_accumulated();                                   // may make a new exchange
      if (gradients_.expired() || !reducer->is_fused_with(this) || !serves(optimizer)) {
        reducer->fetch_averages();
        fuse(optimizer);
      }
    }
    if (fused_ && reducer) {
      step_fused(optimizer, *reducer);
    } else {
      // Once its model is gone, the optimizer steps this rank's weights only, and the other ranks need not step, too.
      const bool is_alone = fused_ != nullptr;
      if (is_alone && fused_->has_spread_state())
        throw Error(ExitCode::user_error, "stepping an optimizer whose model is not prepared any longer",
                    "the other nodes have parts of its state",
                    "Call gather_state() on all ranks before the session or DataParallel ends");
      const auto parameters = parameters_of(optimizer);
      gradients::fetch_averages(parameters);
      std::optional<double> norm;
      std::vector<at::Tensor> clipped;
      if (options_.max_grad_norm > 0) norm = grad_norm_ = norm_of(clipped = gradients_of(parameters));
      if (!is_alone && !numbers_.allow(parameters, norm)) return loss;
      if (norm) scale_down(clipped, *norm, options_.max_grad_norm);
      plain(nullptr);
    }
    return loss;
  }

  void step_fused(torch::optim::Optimizer& optimizer, gradients::Reducer& reducer) {
    const auto word = fused_->prepare(optimizer);
    reducer.begin_step(word);
    const auto check = numbers_.begin_fused();
    const auto stepped = fused_->step(optimizer, options_.max_grad_norm, check);
    grad_norm_ = stepped.norm;
    reducer.end_step(stepped.scale);
    if (stepped.ranks_differ) throw_difference(reducer);
    fused_->clear_notes();
    numbers_.end_fused(check, stepped, fused_->parameters());
  }

  /// Throws the Error that names the parameter for which the ranks' steps differ. Collective.
  [[noreturn]] void throw_difference(const gradients::Reducer& reducer) const {
    const auto [parameter, written] = fused_->difference();
    const auto name = reducer.name_of(fused_->parameters()[parameter]);
    constexpr const char* doing = "stepping an optimizer that is fused with the averaging of gradients";
    if (!written)
      throw Error(
          ExitCode::user_error, doing,
          "the options or the number of steps of parameter " + name + " are not the same on all ranks",
          "Change options in the same way on all ranks; reduce a metric before you choose a learning rate by it");
    throw Error(
        ExitCode::user_error, doing,
        "parameter " + name +
            " or its state was written to since the last step, and not with the same values on all ranks",
        "Prepare every optimizer that steps it, write the same values on all ranks, or prepare with Fuse::never");
  }

  /// Steps with an optimizer that evaluates its closure itself. It may compare losses, so all ranks give it the mean of
  /// their losses.
  at::Tensor step_by_evaluations(torch::optim::Optimizer& optimizer, const Closure& closure,
                                 const std::function<at::Tensor(Closure)>& plain) {
    constexpr const char* stepping = "stepping an optimizer that evaluates its closure itself";
    if (options_.max_grad_norm > 0)
      throw Error(
          ExitCode::usage, stepping, "its gradients cannot be scaled down between its evaluations",
          "Prepare it without max_grad_norm; or call the closure before step(), where one evaluation is enough");
    if (numbers_.watched())
      throw Error(ExitCode::usage, stepping, "its gradients cannot be checked for bad numbers between its evaluations",
                  "Set bad_numbers to ignore; or call the closure before step(), where one evaluation is enough");
    const auto model = model_.lock();
    if (!model) return plain(closure);
    const auto& reducer = *model->reducer();
    if (reducer.is_joined())
      throw Error(ExitCode::usage, stepping, "inside join() not all ranks take part in each of its evaluations",
                  "Give all ranks the same number of batches");
    const auto parameters = parameters_of(optimizer);
    gradients::fetch_averages(parameters);  // the optimizer may read .grad before its first evaluation
    return plain([&] {
      const auto loss = [&] {
        const at::AutoGradMode grad(true);
        return closure();
      }();
      gradients::fetch_averages(parameters);
      if (!loss.defined()) return loss;
      const double weight = reducer.weight();
      const double mine = weight > 0 ? weight * loss.item<double>() : 0;
      return at::full_like(loss.detach(), model->channel().all_reduce(mine) / model->channel().size());
    });
  }

  /// True if the optimizer steps exactly these parameters. A frozen parameter counts if it has a gradient, since
  /// torch's optimizers would step it.
  static bool owns(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters) {
    const auto stepped = parameters_of(optimizer);
    const auto known = identities(parameters), owned = identities(stepped);
    return std::ranges::includes(owned, known) && std::ranges::all_of(stepped, [&](const at::Tensor& parameter) {
             return known.contains(parameter.unsafeGetTensorImpl()) ||
                    (!parameter.requires_grad() && !parameter.grad().defined());
           });
  }

  /// True if the fused step can carry out the optimizer's present options and groups.
  bool serves(torch::optim::Optimizer& optimizer) const {
    const int states = state_tensor_count(optimizer);
    return states >= 0 && states <= fused_->max_state_tensors() && owns(optimizer, fused_->parameters());
  }

  std::weak_ptr<gradients::PreparedModel> model_;  ///< the model whose parameters the optimizer steps
  std::weak_ptr<gradients::Reducer> reducer_;      ///< the reducer of model_
  OptimizerOptions options_;
  bool evaluates_;
  Numbers numbers_;
  std::shared_ptr<SnapshotSources> snapshot_sources_;
  std::shared_ptr<LastRates> last_rates_;  ///< null if learning rates are not recorded
  std::size_t rates_number_;               ///< position of this optimizer in last_rates_
  std::int64_t steps_ = 0;
  std::unique_ptr<FusedStep> fused_;
  std::weak_ptr<gradients::SharedExchange> gradients_;  ///< of fused_; expires when the exchange is replaced
  const std::shared_ptr<const void> lifetime_ = std::make_shared<char>();  ///< identifies this optimizer to reducers
  double grad_norm_ = 0;
};

/// Returns the first model that has a parameter of the optimizer and whose gradients are averaged.
std::shared_ptr<gradients::PreparedModel> model_of(torch::optim::Optimizer& optimizer, const Models& models) {
  const auto parameters = parameters_of(optimizer);
  for (const auto& model : models)
    if (const auto& reducer = model->reducer();
        reducer && std::ranges::any_of(parameters, [&](const at::Tensor& p) { return reducer->averages(p); }))
      return model;
  return nullptr;
}

}  // namespace

void require_same_options(const Communicator& communicator, const OptimizerOptions& options) {
  comm::require_same_options(communicator, "prepare_optimizer",
                             {{"max_grad_norm", options.max_grad_norm},
                              {"fuse", options.fuse == Fuse::never    ? "never"
                                       : options.fuse == Fuse::always ? "always"
                                                                      : "automatic"}});
}

std::unique_ptr<OptimizerStep> make_optimizer_step(torch::optim::Optimizer& optimizer,
                                                   const std::vector<std::shared_ptr<gradients::PreparedModel>>& models,
                                                   const OptimizerOptions& options, const SharedOptimizerData& shared) {
  if (!(options.max_grad_norm >= 0))  // infinity is allowed: it scales nothing, but the norm is computed
    throw Error(ExitCode::usage, "preparing the optimizer", "max_grad_norm is negative or not a number",
                "Give a norm, or 0 for none");
  drop_repeated(optimizer);
  const auto [has_rule, evaluates] = step_kind(optimizer);
  auto its = options;
  if (!has_rule) its.fuse = Fuse::never;
  const auto model = model_of(optimizer, models);
  if (model && evaluates) model->channel();  // made now, on all ranks, since making it is collective
  auto step =
      std::make_unique<Step>(model, its, evaluates, Numbers(shared.numbers, shared.optimizer_number, models), shared);
  step->fuse(optimizer);
  return step;
}

Prepared::Prepared(std::unique_ptr<OptimizerStep> step) : step_(std::move(step)) {}
Prepared::Prepared(Prepared&&) noexcept = default;
Prepared& Prepared::operator=(Prepared&&) noexcept = default;
Prepared::~Prepared() = default;

double Prepared::grad_norm() const noexcept { return step_->grad_norm(); }
bool Prepared::fused() const noexcept { return step_->fused(); }
std::int64_t Prepared::skipped_steps() const noexcept { return step_->skipped_steps(); }

at::Tensor Prepared::take_step(torch::optim::Optimizer& optimizer, const Closure& closure,
                               const std::function<at::Tensor(Closure)>& plain) {
  return step_->step(optimizer, closure, plain);
}

void Prepared::gather_state() { step_->gather_state(); }

void Prepared::average_gradients_of(torch::optim::Optimizer& optimizer) { step_->average_gradients(optimizer); }

}  // namespace muster::detail::optim
