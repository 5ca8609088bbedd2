// Averages the gradients of one module over the ranks, inside backward().
//
// The parameters' hooks call the reducer. Before autograd adds a gradient to .grad, the reducer multiplies it by the
// weight of this rank's batch; afterwards, it gives .grad to the exchange. At the end of backward(), it writes the
// averages to .grad. All gradients in .grad are weighted, so gradients may be accumulated over several rounds, with or
// without averaging in between: the average of the sum is correct.
//
// The contract:
// - All ranks run the same rounds (backward passes over the module) in the same order. In each round, each rank reaches
//   at least one parameter; the ranks may reach different ones. A rank that reaches none never calls the reducer, and
//   the others wait for it until the timeout. With several models, ranks may start them in different orders.
// - All ranks freeze and unfreeze the same parameters. A parameter that is frozen from the start costs nothing until it
//   is unfrozen.
// - After an exception in backward(), .grad holds a mixture of this rank's gradients and averages; call zero_grad() on
//   all ranks alike and go on. If only some ranks had an exception and continue, the other ranks throw an Error. With
//   virtual workers, .grad again holds what it held before the step.
// - If the program gives weights (BatchWeight::given), gradients are multiplied by them. The exchange's result is
//   divided by the mean of the ranks' weights, which are sent along with the gradients. Averages of earlier rounds are
//   moved out of .grad meanwhile. Such rounds are averaged in backward() even if there is a fused optimizer.
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
  /// Called when Reducer::set_fused() replaces this optimizer; not when a newly trained parameter ends the fusion,
  /// after which the optimizer's step fuses it again. Collective.
  virtual void on_unfused() = 0;
  /// Called when a backward() begins although no step has followed the previous backward(), which an exception may have
  /// ended.
  virtual void on_second_round() = 0;

 protected:
  ~FusedOptimizer() = default;
};

/// Averages the gradients of one model. Many members, since autograd's hooks use all of them: the parameters, the
/// exchanges, the current round, and gradients that earlier rounds have left.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Makes the exchange for these parameters. Collective.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(const std::vector<at::Tensor>& parameters)>;

  /// `make_sparse` makes the exchange for the gradients of sparse embeddings, `make_dense` the exchange for all other
  /// gradients. backward() calls nothing before install(). Collective.
  Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
          MakeExchange make_sparse);
  ~Reducer();

  /// Installs the hooks in the module's parameters. Call it once.
  void install();

  /// Throws an Error that names the first parameter that was moved, resized, replaced, added or removed since
  /// prepare_model, or whose hook was replaced.
  void check_parameters() const;
  /// Faster than check_parameters(), since it only compares shape, type and device: throws an Error that names the
  /// first parameter whose shape, type or device has changed since prepare_model.
  void check_shapes() const;

  // Called by the hooks, on the thread that runs backward().
  /// Returns the tensor that autograd adds to the parameter's .grad in place of `gradient`.
  at::Tensor before_accumulation(std::size_t parameter, const at::Tensor& gradient);
  /// Called when autograd has added a gradient to the parameter's .grad.
  void after_accumulation(std::size_t parameter);

  /// Number of rounds that this rank has averaged. A round averages at the end of backward(); with virtual workers,
  /// after the step's last micro-batch; with a fused optimizer, in its step. The same on all ranks, except that a round
  /// which an exception has ended on this rank does not count here.
  std::int64_t averaged_round_count() const noexcept { return rounds_; }
  /// Number of backward() passes that have begun on this rank, with averaging or without.
  std::int64_t begun_round_count() const noexcept { return begun_rounds_; }
  /// False within a step: with virtual workers, before the step's last micro-batch.
  bool is_step_complete() const noexcept { return steps_->is_step_complete(); }
  /// True if any rank had been asked to stop when the last averaging round began. The same on all ranks.
  bool any_stop_requested() const noexcept { return any_stop_requested_; }

  // For a fused optimizer: backward() then leaves this rank's own gradients in .grad, and the optimizer takes all
  // ranks' gradients from the exchange. Sparse gradients are still averaged in backward().
  /// Sets the fused optimizer; if null, backward() averages. Calls on_unfused() of the previous one. Collective.
  void set_fused(FusedOptimizer* optimizer);
  bool has_fused_optimizer() const noexcept { return fused_ != nullptr; }
  /// True if `optimizer` is the fused one. Training an unfrozen parameter for the first time ends the fusion, since it
  /// makes a new exchange.
  bool is_fused_with(const FusedOptimizer* optimizer) const noexcept { return fused_ == optimizer; }
  /// Returns the gradients that a fused optimizer works on; null if the exchange does not offer them. Keep only a weak
  /// pointer to the result: it expires when a newly trained parameter makes a new exchange necessary.
  std::shared_ptr<FusableGradients> fusable() const { return {dense_, dense_->fusable()}; }
  /// Returns the parameters of the dense exchange, in the exchange's order.
  std::vector<at::Tensor> dense_parameters() const;
  /// Gives the current .grad to the exchange. `word`: a word that all ranks must have in common
  /// (FusableGradients::all_words_equal). The optimizer finishes the exchange.
  void begin_step(std::uint32_t word);
  /// Called when the optimizer has finished the exchange and stepped with `scale` times the averages. Throws an Error,
  /// the same on all ranks, if a rank had abandoned the round, if .grad was changed by hand since backward(), or if
  /// only some gradients have weights; in each case the optimizer has written nothing.
  void end_step(double scale);
  /// True if backward() has left gradients to the optimizer.
  bool awaits_step() const noexcept { return phase_ == Phase::awaiting_step; }
  /// For all readers of gradients except the fused optimizer: calls average_accumulated(); then, if .grad holds this
  /// rank's own gradients, replaces them by the averages. Throws as end_step() does. Collective.
  void fetch_averages();
  /// If the last rounds were in no_sync(), averages the gradients that they have accumulated; with a fused optimizer,
  /// dense gradients then wait for its step. Collective.
  void average_accumulated();
  /// True if the last round was in no_sync().
  bool last_round_was_no_sync() const noexcept { return last_round_was_no_sync_; }
  /// As average_accumulated(), but averages even if this rank's last round was not in no_sync(), since that of another
  /// rank was. Collective.
  void average_accumulated_on_all();
  /// Call it before muster itself changes .grad, on all ranks alike. It records which gradients were changed by hand
  /// until now.
  void before_own_change();

  // The next two are for finding NaN and infinite numbers.
  /// From now on, this rank's small gradients on the CPU are checked as they are made.
  void watch_numbers() noexcept { watches_numbers_ = true; }
  /// Name of the first parameter with a bad gradient among those that were checked; empty if there was none, or if that
  /// parameter has had a good gradient since.
  const std::string& bad_gradient() const noexcept { return bad_gradient_; }

  /// Returns the parameter's name; empty if the tensor is not a parameter of the module.
  std::string name_of(const at::Tensor& parameter) const;
  /// True if the parameter's gradients are averaged.
  bool averages(const at::Tensor& parameter) const;
  /// The weight of this rank's loss in the mean of the ranks' losses; 1 is an even share. It is the weight of the
  /// current batch or, if the program gives weights itself, this rank's weight in the last average.
  double weight() const { return weights_.given ? weights_.relative : steps_->weight(); }
  /// Number of this reducer in the order of prepare_model(); the same on all ranks.
  int order() const noexcept { return order_; }

  // The following are for ranks with different numbers of rounds (join.cpp).
  /// Corrects the averages of a round in which some ranks have no gradients: the averages are multiplied by `scale`;
  /// then the averages that earlier rounds left in .grad are added, times `earlier_factor`.
  struct Correction {
    double scale = 1;
    double earlier_factor = 0;
  };
  /// Makes every backward() call `before` at its start; an empty function ends this. The argument tells `before`
  /// whether the round averages. What `before` throws, backward() throws. `keeps_averages`: true if `earlier_factor`
  /// may differ from 0; then the averages in .grad are copied before gradients are added to them.
  void before_each_round(std::function<Correction(bool averages)> before, bool keeps_averages = false) {
    before_round_ = std::move(before);
    keeps_averages_ = keeps_averages;
    if (!before_round_) weights_.unit = 0;  // a rank without rounds in join() has not followed its changes
  }
  bool is_joined() const noexcept { return before_round_ != nullptr; }
  /// True if a parameter requires a gradient but no round has trained it yet.
  bool has_new_trainable() const { return !unfrozen().empty(); }
  /// Takes part in a round of the other ranks without adding gradients. Collective.
  void take_part_without_gradients();
  /// Makes the next backward() throw `failure`.
  void fail_next_backward(std::exception_ptr failure) noexcept { failure_ = std::move(failure); }

  // The following are for saving a session between two rounds.
  /// Finishes the rounds that exceptions have ended, since other ranks may wait in them. Collective if there are any.
  void finish_abandoned_rounds();
  /// Returns the parameters whose .grad a save must hold: no optimizer has stepped them since the last backward(), and
  /// the program does not discard the gradient. (A GAN discards the gradients that the generator's loss gives to the
  /// discriminator.) The second call and later calls recognise discarded gradients; this ends once a later batch has
  /// added to gradients that waited for a step. Call it at the boundary between two steps.
  ///
  /// Prepared optimizers report which parameters they step; if there is any prepared optimizer, parameters of no
  /// prepared optimizer are left out. For other optimizers, a change of any parameter counts as a step of all
  /// parameters; a step that changes next to nothing is not noticed.
  std::vector<at::Tensor> with_gradient_to_save();
  /// The weights that the gradients in .grad were multiplied by; for gradients of rounds in no_sync() that are not
  /// averaged yet.
  struct LocalWeights {
    double sum = 0;   ///< of the weights, each times `unit`
    double unit = 0;  ///< the same on all ranks
  };
  std::optional<LocalWeights> local_weights() const;
  /// True if local_weights() has a value; the same on all ranks.
  bool accumulates_with_weights() const noexcept { return weights_.given && last_round_was_no_sync_; }
  /// True if averages were moved out of .grad because rounds with weights add to it.
  bool has_averages_aside() const noexcept;
  /// Sets .grad to the gradients of a save, the same on all ranks, and removes .grad where the saved tensor is
  /// undefined. `saved`: by parameter; parameters that it does not list are left alone. `weights`: local_weights() when
  /// the gradients were saved.
  void restore_gradients(const std::map<const void*, at::Tensor>& saved, const std::optional<LocalWeights>& weights);
  /// Records that a prepared optimizer has the parameter. `optimizer` expires when that optimizer is destroyed.
  void note_optimizer(std::size_t parameter, const std::weak_ptr<const void>& optimizer);
  /// Records that the parameter's optimizer has stepped it, or has skipped its step.
  void note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer);

 private:
  struct Parameter;
  struct Round;

  /// The phase of this rank's exchanges. A round here is an averaging round. Each line: an event -> the next phase.
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
  ///                                                Over several nodes, the exchange gets them nevertheless (Early)
  ///   postponed      more gradients             -> postponed: .grad only accumulates
  ///                  the end of backward()      -> collecting, once abandoned rounds are finished; all gradients are
  ///                                                given at once
  ///   awaiting_step  the step                   -> idle
  ///                  fetch_averages()           -> idle: .grad holds the averages, and the step may average them again
  ///                  a gradient of a new round  -> collecting or postponed: the step averages the sum
  ///                  a gradient in no_sync()    -> awaiting_step
  ///
  /// The fusion ends when set_fused() removes the fused optimizer, as when it is destroyed, or when a round trains a
  /// parameter for the first time. In the first case, the next round averages in backward(); in the second case, that
  /// same round does. If .grad still holds this rank's own gradients when it begins, these gradients count as pending.
  ///
  /// An exception, at whatever line of backward(), destroys the Round and leaves the phase at collecting or postponed.
  /// The next event (a gradient, a step, the end of join() or finish_abandoned_rounds()) abandons that round: -> idle.
  /// The other ranks finish the round without this rank's gradients, and so learn of the exception. This rank finishes
  /// it the next time it waits for the others anyway. If finishing throws, or an exchange does, the phase is already
  /// the phase that follows the round.
  ///
  /// If one backward() runs through several models, each model's reducer has its own phase. All reducers give their
  /// gradients before the first one finishes, and they finish in the order of prepare_model(), since ranks may begin
  /// them in different orders. autograd::grad() does not add to .grad, so it is no round. A frozen parameter
  /// contributes the contents of its .grad.
  enum class Phase { idle, collecting, postponed, awaiting_step };

  /// Weights that the program gives to batches.
  struct Weights {
    bool given = false;   ///< true if the program gave a weight to the batch of the last round
    double unit = 0;      ///< power of two, the same on all ranks, that brings weights near 1, which 16 bits need
    double sum = 0;       ///< of this rank's weights, each times `unit`, over the rounds since the last average
    double relative = 1;  ///< this rank's weight in the last average; 1 is an even share
    bool warned = false;  ///< true if a warning has said that all were 0
  };

  /// A round that an exception has ended and in which other ranks may wait.
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
  /// `takes_part`: false if this rank contributes neither gradients nor a weight.
  void begin_exchanges(Arrival arrival, bool takes_part = true);
  Flags flags() const;
  /// True if the parameter's gradient is averaged in this backward(); false if it is left to a fused optimizer's step.
  bool averages_in_backward(const Parameter& parameter) const noexcept;
  /// True if the exchange gets the parameter's gradient in this backward().
  bool given_in_backward(const Parameter& parameter) const noexcept;
  bool end_early(bool valid, Flags flags = 0, std::uint32_t word = 0);
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

  // For gradients that backward() leaves to a fused optimizer.
  void average_local_gradients();
  void mark_gradients();
  void note_manual_change(Parameter& parameter);
  void before_own_change(Parameter& parameter);
  GradientMark mark_of(const Parameter& parameter) const;
  bool is_as_given(const Parameter& parameter) const;
  void give_gradients(Flags purpose, std::uint32_t word);
  void end_exchange(bool fetch);
  [[noreturn]] void throw_changed();

  // For rounds that an exception has ended.
  void copy_gradients() noexcept;
  void abandon_round();
  void finish_abandoned();

  // For finding gradients that wait for an optimizer's step.
  ParameterSamples sample_parameters() const;
  void note_change_of_parameters();
  void note_discarded();
  void note_addition();

  int order_;  ///< see order()
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<const step::Steps> steps_;
  std::shared_ptr<const int> no_sync_depth_;
  std::function<bool()> stop_requested_;

  /// The name and tensor of each parameter, as in prepare_model().
  std::vector<std::pair<std::string, const void*>> names_;
  std::vector<Parameter> parameters_;  ///< all parameters; a tensor that has two names is listed once
  MakeExchange make_dense_, make_sparse_;
  std::shared_ptr<Exchange> dense_;
  std::unique_ptr<Exchange> sparse_;  ///< null if there is no sparse parameter

  FusedOptimizer* fused_ = nullptr;
  bool has_local_gradients_ =
      false;  ///< true if .grad of dense parameters holds this rank's own gradients, for a fused optimizer
  bool last_round_was_no_sync_ = false;  ///< true if the last round was in no_sync(); the same on all ranks
  /// True if an averaging round has begun since the fused optimizer's last step or fetch_averages().
  bool begun_since_step_ = false;
  /// Whether the exchange has begun to average the gradients that the next fused step or fetch_averages() will need.
  enum class Early {
    no,
    begun,    ///< by the only round since the last of these
    useless,  ///< a later round has added to the gradients, so they are averaged anew
  } early_ = Early::no;
  bool watches_numbers_ = false;
  std::string bad_gradient_;
  std::int64_t rounds_ = 0;        ///< see averaged_round_count()
  std::int64_t begun_rounds_ = 0;  ///< see begun_round_count()
  bool any_stop_requested_ = false;
  std::function<Correction(bool averages)> before_round_;
  bool keeps_averages_ = false;
  std::exception_ptr failure_;
  /// A few elements of the parameters at the end of the last backward().
  std::optional<ParameterSamples> after_backward_;
  bool any_left_ = false;  ///< true if gradients waited for a step at the last call of with_gradient_to_save()
  bool adds_up_ = false;   ///< true if a batch has added to gradients that waited for a step
  std::int64_t step_of_last_round_ = -1;

  Phase phase_ = Phase::idle;
  std::vector<Abandoned> abandoned_;  ///< `begun` can be true for the first of them only

  // The current round.
  std::weak_ptr<Round> round_;         ///< owned by autograd; expires when backward() has returned or thrown
  std::vector<std::size_t> unfrozen_;  ///< parameters that this round trains for the first time
  bool dense_in_backward_ = false;     ///< false if the dense exchange begins in the optimizer's step instead
  Correction correction_;
  Weights weights_;
};

}  // namespace muster::detail::gradients
