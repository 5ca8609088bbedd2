// Averages the gradients of one module over the ranks, inside backward().
//
// Hooks of the parameters call it. It weights each gradient by the rank's samples before autograd adds it to .grad, and
// gives it to the exchange afterwards. At the end of backward() it fetches the averages into .grad. Everything in .grad
// is weighted, so gradients may be accumulated over several rounds, with or without averaging in between: the average
// of the sum is correct.
//
// The contract:
// - All ranks run the same rounds (backward passes over the module) in the same order. In each round, each rank reaches
//   at least one parameter; the ranks may reach different ones. A rank that reaches none never calls the reducer, and
//   the others wait for it until the timeout. With several models, ranks may start them in different orders.
// - All ranks freeze and unfreeze the same parameters. A parameter that is frozen from the start costs nothing until it
//   is unfrozen.
// - After an exception in backward(), .grad holds a mixture of this rank's gradients and averages; call zero_grad() and
//   go on, on all ranks alike. If a rank goes on although others had no exception, those others throw an Error.
//   With virtual workers .grad is again what it was before the step.
// - If the program gives weights (BatchWeight::given), gradients are multiplied by them, and what the exchange averages
//   is divided by the mean of the ranks' weights, which travel with the gradients. Averages of earlier rounds are set
//   aside in the meantime. Such rounds are averaged in backward() for a fused optimizer, too.
// - Gradients that zero_grad() has removed are gone: no round and no optimizer averages them.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/tensor_changes.hpp"
#include "step/steps.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster::detail::gradients {

struct ParallelContext;

/// An optimizer that averages gradients itself, as part of its step (optim/optimizer_step.cpp).
class FusedOptimizer {
 public:
  /// Called when Reducer::set_fused() replaces this optimizer.
  virtual void on_unfused() noexcept = 0;
  /// Called when a backward() begins and no step has followed the previous one, which an exception may have ended.
  virtual void on_second_round() = 0;

 protected:
  ~FusedOptimizer() = default;
};

/// Averages the gradients of one model. Many members, since autograd's hooks share them: the parameters, the exchanges,
/// the round under way, and what the step before it has left.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Makes the exchange for these parameters. Collective.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(const std::vector<at::Tensor>& parameters)>;

  /// `make_sparse` makes the exchange for the gradients of sparse embeddings, `make_dense` the one for all others.
  /// Does nothing more before install(). Collective.
  Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
          MakeExchange make_sparse);
  ~Reducer();

  /// Hooks this reducer into its module's parameters. Call it once.
  void install();

  /// Throws an Error that names the first parameter that was moved, resized, replaced, added or removed since
  /// prepare_model, or whose hook was replaced.
  void check_parameters() const;
  /// Throws an Error that names the first parameter whose shape, type or device has changed since prepare_model.
  /// Faster than check_parameters().
  void check_shapes() const;

  // Called by the hooks, on the thread that runs backward().
  /// Returns the tensor that autograd adds to the parameter's .grad in place of `gradient`.
  at::Tensor before_accumulation(std::size_t parameter, const at::Tensor& gradient);
  /// Called when a gradient has been added to the parameter's .grad.
  void after_accumulation(std::size_t parameter);

  /// Number of averaging rounds. A round averages at the end of backward(); with virtual workers, after the step's last
  /// micro-batch; with a fused optimizer, in its step. The same on all ranks, except for rounds without gradients.
  std::int64_t averaged_round_count() const noexcept { return rounds_; }
  /// Number of backward() that have begun on this rank, with averaging or without.
  std::int64_t begun_round_count() const noexcept { return begun_rounds_; }
  /// False within a step: with virtual workers, before the step's last micro-batch.
  bool is_step_complete() const noexcept { return steps_->is_step_complete(); }
  /// True if any rank had been asked to stop when the last averaging round began. The same on all ranks.
  bool any_stop_requested() const noexcept { return any_stop_requested_; }

  // For a fused optimizer: backward() then leaves this rank's own gradients in .grad, and the optimizer takes all
  // ranks' gradients from the exchange. Sparse gradients are still averaged in backward().
  /// Sets the fused optimizer; if null, backward() averages. Calls on_unfused() of the previous one.
  void set_fused(FusedOptimizer* optimizer) noexcept;
  bool has_fused_optimizer() const noexcept { return fused_ != nullptr; }
  /// True if `optimizer` is the fused one. Unfreezing a parameter ends the fusion, since it makes a new exchange.
  bool is_fused_with(const FusedOptimizer* optimizer) const noexcept { return fused_ == optimizer; }
  /// Returns the gradients that a fused optimizer works on; null if the exchange does not offer them. Hold the result
  /// weakly: it expires when an unfrozen parameter makes a new exchange necessary.
  std::shared_ptr<FusableGradients> fusable() const { return {dense_, dense_->fusable()}; }
  /// Returns the parameters of the dense exchange, in its order.
  std::vector<at::Tensor> dense_parameters() const;
  /// Gives the current .grad to the exchange, with a word for the other ranks (FusableGradients::all_words_equal). The
  /// optimizer finishes the exchange.
  void begin_step(std::uint32_t word);
  /// Called when the optimizer has finished the exchange and stepped with `scale` times the averages. Throws an Error,
  /// the same on all ranks, if a rank had abandoned the round or if .grad was changed by hand since backward(); in both
  /// cases the optimizer has written nothing.
  void end_step(double scale);
  /// True if backward() has left gradients to the optimizer.
  bool awaits_step() const noexcept { return state_ == State::awaiting_step; }
  /// For all other readers of gradients: if .grad holds this rank's own gradients, replaces them by the averages.
  /// Throws as end_step() does. Collective.
  void fetch_averages();
  /// If the last rounds were in no_sync(), averages the gradients that they have accumulated; with a fused optimizer,
  /// dense gradients then wait for its step. Collective.
  void average_accumulated();
  /// True if the last round was in no_sync().
  bool last_round_was_no_sync() const noexcept { return last_round_was_no_sync_; }
  /// Does what average_accumulated() does even if this rank's last round was not in no_sync(), since other ranks have
  /// gradients to average. Collective.
  void average_accumulated_on_all();
  /// Call before muster itself changes .grad, on all ranks alike. Notes which gradients were changed by hand until now.
  void before_own_change();

  // For finding NaN and infinite numbers.
  /// From now on, this rank's small gradients are checked as they are made.
  void watch_numbers() noexcept { watches_numbers_ = true; }
  /// Name of the parameter of the first bad gradient that has not been replaced by a good one; empty if there is none.
  const std::string& bad_gradient() const noexcept { return bad_gradient_; }
  /// Returns the parameter's name; empty if the tensor is not a parameter of the module.
  std::string name_of(const at::Tensor& parameter) const;
  /// True if the parameter's gradients are averaged.
  bool averages(const at::Tensor& parameter) const;
  /// The weight of this rank's loss in the mean of the ranks' losses, relative to an even share: that of the current
  /// batch, or of the last average if the program gives weights.
  double weight() const { return weights_.given ? weights_.relative : steps_->weight(); }
  /// Position among all reducers; the same on all ranks.
  int order() const noexcept { return order_; }

  // For ranks with different numbers of rounds (join.cpp).
  /// Corrects the averages of a round in which some ranks have no gradients: the averages are multiplied by `scale`;
  /// then the averages that earlier rounds left in .grad are added, times `earlier_factor`.
  struct Correction {
    double scale = 1;
    double earlier_factor = 0;
  };
  /// Calls `before` at the start of every backward() and tells it whether that round averages; backward() throws what
  /// it throws. An empty function ends this. `keeps_averages`: true if `earlier_factor` may be other than 0; averages
  /// in .grad are then copied before gradients are added to them.
  void before_each_round(std::function<Correction(bool averages)> before, bool keeps_averages = false) {
    before_round_ = std::move(before);
    keeps_averages_ = keeps_averages;
    if (!before_round_) weights_.unit = 0;  // ranks that have had no round do not know it
  }
  bool is_joined() const noexcept { return before_round_ != nullptr; }
  /// True if a parameter requires a gradient that no round has trained before.
  bool has_new_trainable() const { return !unfrozen().empty(); }
  /// Takes part in a round of the other ranks, without gradients. Collective.
  void take_part_without_gradients();
  /// Makes the next backward() throw `failure`.
  void fail_next_backward(std::exception_ptr failure) noexcept { failure_ = std::move(failure); }

  // For saving a session between two rounds.
  /// Finishes the rounds that exceptions have cut off, since other ranks may wait in them. Collective if there are any.
  void finish_abandoned_rounds();
  /// Returns the parameters whose .grad a save must hold: no optimizer has stepped with it since the last backward(),
  /// and the program does not discard it, as a GAN discards the discriminator's gradients of the generator's loss.
  /// Discarding is recognised from the second call on, unless a later batch has ever added to such gradients. Call it
  /// at boundaries between steps.
  ///
  /// Prepared optimizers report what they step; if there are any, gradients of parameters that none of them has are
  /// ignored. For other optimizers, a change of any parameter counts as a step of all parameters; a step that changes
  /// next to nothing is not noticed.
  std::vector<at::Tensor> with_gradient_to_save();
  /// Where rounds under no_sync() with weights have yet to be averaged: the weights that the gradients in .grad were
  /// multiplied by.
  struct LocalWeights {
    double sum = 0;   ///< of the weights, times `unit`
    double unit = 0;  ///< the same on all ranks
  };
  std::optional<LocalWeights> local_weights() const;
  /// True if local_weights() has a value; the same on all ranks.
  bool accumulates_with_weights() const noexcept { return weights_.given && last_round_was_no_sync_; }
  /// True if averages are set aside while rounds with weights add to .grad.
  bool has_averages_aside() const noexcept;
  /// Sets .grad to what a save has held, the same on all ranks, and removes it where that is undefined. `saved`: by
  /// parameter; others are left alone. `weights`: those of the saved gradients, if they had any.
  void restore_gradients(const std::map<const void*, at::Tensor>& saved, const std::optional<LocalWeights>& weights);
  /// Notes that a prepared optimizer has the parameter. `optimizer` expires with it.
  void note_optimizer(std::size_t parameter, const std::weak_ptr<const void>& optimizer);
  /// Notes that its optimizer has stepped the parameter or has skipped its step.
  void note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer);

 private:
  struct Parameter;
  struct Round;

  /// The state of this rank's exchanges with the others. A round here averages.
  ///
  ///   idle           a gradient of a new round  -> collecting; postponed if abandoned rounds must end first, or
  ///                                                new exchanges made for unfrozen parameters
  ///                  a gradient in no_sync()    -> idle: .grad only accumulates, until average_accumulated()
  ///                  a fused optimizer's step   -> idle: the step averages the contents of .grad
  ///                  fetch_averages()           -> idle: averages .grad if it holds this rank's own gradients
  ///   collecting     more gradients             -> collecting: the exchanges get them as they are made
  ///                  the end of backward()      -> idle: .grad holds the averages; with virtual workers, it is empty
  ///                                                before the step's last micro-batch
  ///                                             -> awaiting_step, if an optimizer is fused and the program gives no
  ///                                                weights: .grad holds this rank's own gradients, also after the
  ///                                                step, until fetch_averages()
  ///   postponed      more gradients             -> postponed: .grad only accumulates
  ///                  the end of backward()      -> collecting, once abandoned rounds are finished; all gradients are
  ///                                                given at once
  ///   awaiting_step  the step                   -> idle
  ///                  fetch_averages()           -> idle: .grad holds the averages, and the step may average them again
  ///                  a gradient of a new round  -> collecting or postponed: the step averages the sum
  ///                  a gradient in no_sync()    -> awaiting_step
  ///
  /// The fusion ends when the fused optimizer is destroyed, or when a round trains a parameter for the first time. The
  /// next round, or in the second case that round, averages in backward(). If .grad still holds this rank's own
  /// gradients when it begins, they count as pending.
  ///
  /// An exception, at whatever line of backward(), destroys the Round and leaves the state at collecting or postponed.
  /// The next event (a gradient, a step, the end of join() or finish_abandoned_rounds()) abandons that round: -> idle.
  /// The other ranks learn of it at the end of that round, which they finish without this rank's gradients. This rank
  /// finishes it the next time it waits for the others anyway. If that or an exchange throws, the state is already as
  /// after the round.
  ///
  /// Each of several models in one backward() has its own state. All reducers give their gradients before the first one
  /// finishes, and they finish in the order of prepare_model, since ranks may begin them in different orders.
  /// autograd::grad() adds to no .grad, so it is not a round. A frozen parameter contributes what is in its .grad.
  enum class State { idle, collecting, postponed, awaiting_step };

  /// Weights that the program gives to batches.
  struct Weights {
    bool given = false;   ///< true if the last round had one
    double unit = 0;      ///< power of two, the same on all ranks, that brings weights near 1, which 16 bits need
    double sum = 0;       ///< of this rank's rounds since the last average, times `unit`
    double relative = 1;  ///< of this rank in the last average; 1 is an even share
    bool warned = false;  ///< true if a warning has said that all were 0
  };

  /// A round that an exception has cut off and in which other ranks may wait.
  struct Abandoned {
    std::vector<std::size_t> unfrozen;
    bool begun;  ///< true if the exchanges have begun it
  };

  // Which parameters are exchanged.
  std::vector<std::size_t> unfrozen() const;
  void extend_exchanges(const std::vector<std::size_t>& unfrozen);
  Exchange& exchange_of(const Parameter& parameter) const noexcept;

  // A round: a backward() that adds to gradients of the module. An averaging round also averages them.
  void prepare_round(bool averages);
  std::shared_ptr<Round> begin_round();
  bool holds_gradient(const Parameter& parameter) const;
  void begin_weights();
  void end_weights();
  void require_weights_alike(Flags flags) const;
  void set_average_aside(Parameter& parameter) const;
  void set_earlier_gradients_aside();
  void restore_earlier_gradients() noexcept;
  /// `takes_part`: false if this rank has neither gradients nor a weight.
  void begin_exchanges(Arrival arrival, bool takes_part = true);
  Flags flags() const;
  /// True if the exchange that averages the parameter runs in this backward(), not in a fused optimizer's step.
  bool averages_in_backward(const Parameter& parameter) const noexcept;
  void check_numbers(const Parameter& parameter);
  void keep_average(Parameter& parameter) const;
  void add(Parameter& parameter);
  void add_remaining();
  void add_missing(ParameterUse use);
  using Reducers = std::vector<std::shared_ptr<Reducer>>;
  static std::shared_ptr<Reducers> ready_in_this_backward();
  static void finish_all(Reducers& ready);
  void finish_round();
  void finish_exchanges();
  Flags flags_of_all() const;
  void count_round(Flags flags);
  int user_count(const Parameter& parameter) const;
  void finish_gradient(Parameter& parameter, bool fetch);
  void clear_gradient(Parameter& parameter);

  // This rank's own gradients, which backward() leaves to a fused optimizer.
  void average_local_gradients();
  void mark_gradients();
  void note_manual_change(Parameter& parameter);
  void give_gradients(std::uint32_t word);
  void end_exchange(bool fetch);
  [[noreturn]] void throw_changed();

  // After an exception.
  void copy_gradients() noexcept;
  void abandon_round();
  void finish_abandoned();

  // Whether gradients wait for an optimizer's step.
  ParameterSamples sample_parameters() const;
  void note_change_of_parameters();
  void note_discarded();
  void note_addition();

  int order_;  ///< position among all reducers; the same on all ranks
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<const step::Steps> steps_;
  std::shared_ptr<const int> no_sync_depth_;
  std::function<bool()> stop_requested_;

  std::vector<std::pair<std::string, const void*>> names_;  ///< each name and its tensor, as in prepare_model
  std::vector<Parameter> parameters_;                       ///< each tensor once
  MakeExchange make_dense_, make_sparse_;
  std::shared_ptr<Exchange> dense_;
  std::unique_ptr<Exchange> sparse_;  ///< null if there is no sparse parameter

  FusedOptimizer* fused_ = nullptr;
  bool has_local_gradients_ =
      false;  ///< true if .grad of dense parameters holds this rank's own gradients, for a fused optimizer
  bool last_round_was_no_sync_ = false;  ///< true if the last round was in no_sync(); the same on all ranks
  /// True if an averaging round has begun since the fused optimizer's last step or fetch_averages().
  bool begun_since_step_ = false;
  bool watches_numbers_ = false;
  std::string bad_gradient_;
  std::int64_t rounds_ = 0;        ///< that have been averaged
  std::int64_t begun_rounds_ = 0;  ///< with averaging or without
  bool any_stop_requested_ = false;
  std::function<Correction(bool averages)> before_round_;
  bool keeps_averages_ = false;
  std::exception_ptr failure_;
  std::optional<ParameterSamples> after_backward_;  ///< of the parameters, at the end of the last backward()
  bool any_left_ = false;  ///< true if gradients waited for a step at the last call of with_gradient_to_save()
  bool adds_up_ = false;   ///< true if a batch has added to gradients that waited for a step
  std::int64_t step_of_last_round_ = -1;

  State state_ = State::idle;
  std::vector<Abandoned> abandoned_;  ///< only the first may be begun

  // The current round.
  std::weak_ptr<Round> round_;         ///< owned by autograd; expires when backward() has returned or thrown
  std::vector<std::size_t> unfrozen_;  ///< parameters that no earlier round has trained
  bool dense_in_backward_ = false;     ///< false if the dense exchange begins in the optimizer's step instead
  Correction correction_;
  Weights weights_;
};

}  // namespace muster::detail::gradients
