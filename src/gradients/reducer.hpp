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

#include "gradients/given_weights.hpp"
#include "gradients/local_gradients.hpp"
#include "gradients/model_exchanges.hpp"
#include "gradients/model_parameters.hpp"
#include "gradients/rounds.hpp"
#include "gradients/unstepped_gradients.hpp"
#include "step/steps.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
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

namespace muster::detail::gradients {

struct ParallelContext;

/// Averages the gradients of one model. It takes each gradient through its round (rounds.hpp).
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  using MakeExchange = ModelExchanges::Make;

  /// `make_sparse` makes the exchange for the gradients of sparse embeddings, `make_dense` the exchange for all other
  /// gradients. backward() calls nothing before install(). Collective.
  Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
          MakeExchange make_sparse);

  /// Installs the hooks in the module's parameters. Call it once.
  void install() { parameters_.install_hooks(weak_from_this()); }

  /// Throws an Error that names the first parameter that was moved, resized, replaced, added or removed since
  /// prepare_model, or whose hook was replaced.
  void check_parameters() const { parameters_.check_parameters(); }
  /// Faster than check_parameters(), since it only compares shape, type and device: throws an Error that names the
  /// first parameter whose shape, type or device has changed since prepare_model.
  void check_shapes() const { parameters_.check_shapes(); }

  // Called by the hooks, on the thread that runs backward().
  /// Returns the tensor that autograd adds to the parameter's .grad in place of `gradient`.
  at::Tensor before_accumulation(std::size_t parameter, const at::Tensor& gradient);
  /// Called when autograd has added a gradient to the parameter's .grad.
  void after_accumulation(std::size_t parameter);

  /// Number of rounds that this rank has averaged. A round averages at the end of backward(); with virtual workers,
  /// after the step's last micro-batch; with a fused optimizer, in its step. The same on all ranks, except that a round
  /// which an exception has ended on this rank does not count here.
  std::int64_t averaged_round_count() const noexcept { return rounds_.averaged; }
  /// Number of backward() passes that have begun on this rank, with averaging or without.
  std::int64_t begun_round_count() const noexcept { return rounds_.begun; }
  /// False within a step: with virtual workers, before the step's last micro-batch.
  bool is_step_complete() const noexcept { return steps_->is_step_complete(); }
  /// True if any rank had been asked to stop when the last averaging round began. The same on all ranks.
  bool any_stop_requested() const noexcept { return rounds_.any_stop_requested; }

  // For a fused optimizer: backward() then leaves this rank's own gradients in .grad, and the optimizer takes all
  // ranks' gradients from the exchange. Sparse gradients are still averaged in backward().
  /// Sets the fused optimizer; if null, backward() averages. Calls on_unfused() of the previous one. Collective.
  void set_fused(FusedOptimizer* optimizer);
  bool has_fused_optimizer() const noexcept { return local_.optimizer() != nullptr; }
  /// True if `optimizer` is the fused one. Training an unfrozen parameter for the first time ends the fusion, since it
  /// makes a new exchange.
  bool is_fused_with(const FusedOptimizer* optimizer) const noexcept { return local_.optimizer() == optimizer; }
  /// Returns the gradients that a fused optimizer works on; null if the exchange does not offer them. Keep only a weak
  /// pointer to the result: it expires when a newly trained parameter makes a new exchange necessary.
  std::shared_ptr<SharedExchange> fusable() const { return exchanges_.fusable(); }
  /// Returns the parameters of the dense exchange, in the exchange's order.
  std::vector<at::Tensor> dense_parameters() const { return exchanges_.dense_parameters(); }
  /// Gives the current .grad to the exchange. `word`: a word that all ranks must have in common
  /// (SharedExchange::all_words_equal). The optimizer finishes the exchange.
  void begin_step(std::uint32_t word);
  /// Called when the optimizer has finished the exchange and stepped with `scale` times the averages. Throws an Error,
  /// the same on all ranks, if a rank had abandoned the round, if .grad was changed by hand since backward(), or if
  /// only some gradients have weights; in each case the optimizer has written nothing.
  void end_step(double scale);
  /// True if backward() has left gradients to the optimizer.
  bool awaits_step() const noexcept { return rounds_.phase == Phase::awaiting_step; }
  /// For all readers of gradients except the fused optimizer: calls average_accumulated(); then, if .grad holds this
  /// rank's own gradients, replaces them by the averages. Throws as end_step() does. Collective.
  void fetch_averages();
  /// If the last rounds were in no_sync(), averages the gradients that they have accumulated; with a fused optimizer,
  /// dense gradients then wait for its step. Collective.
  void average_accumulated();
  /// True if the last round was in no_sync().
  bool last_round_was_no_sync() const noexcept { return rounds_.last_was_no_sync; }
  /// As average_accumulated(), but averages even if this rank's last round was not in no_sync(), since that of another
  /// rank was. Collective.
  void average_accumulated_on_all() {
    rounds_.last_was_no_sync = true;
    average_accumulated();
  }
  /// Call it before muster itself changes .grad, on all ranks alike. It records which gradients were changed by hand
  /// until now.
  void before_own_change();

  // The next two are for finding NaN and infinite numbers.
  /// From now on, this rank's small gradients on the CPU are checked as they are made.
  void watch_numbers() { bad_gradient_.emplace(); }
  /// Name of the first parameter with a bad gradient among those that were checked; empty if there was none, or if that
  /// parameter has had a good gradient since.
  std::string bad_gradient() const { return bad_gradient_.value_or(std::string()); }

  /// Returns the parameter's name; empty if the tensor is not a parameter of the module.
  std::string name_of(const at::Tensor& parameter) const { return parameters_.name_of(parameter); }
  /// True if the parameter's gradients are averaged.
  bool averages(const at::Tensor& parameter) const { return parameters_.averages(parameter); }
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
    joined_.before = std::move(before);
    joined_.keeps_averages = keeps_averages;
    if (!is_joined()) weights_.unit = 0;  // a rank without rounds in join() has not followed its changes
  }
  bool is_joined() const noexcept { return joined_.before != nullptr; }
  /// True if a parameter requires a gradient but no round has trained it yet.
  bool has_new_trainable() const { return !exchanges_.unfrozen().empty(); }
  /// Takes part in a round of the other ranks without adding gradients. Collective.
  void take_part_without_gradients();
  /// Makes the next backward() throw `failure`.
  void fail_next_backward(std::exception_ptr failure) noexcept { joined_.failure = std::move(failure); }

  // The following are for saving a session between two rounds.
  /// Finishes the rounds that exceptions have ended, since other ranks may wait in them. Collective if there are any.
  void finish_abandoned_rounds() {
    abandon_round();
    finish_abandoned();
  }
  /// Returns the parameters whose .grad a save must hold: no optimizer has stepped them since the last backward(), and
  /// the program does not discard the gradient. (A GAN discards the gradients that the generator's loss gives to the
  /// discriminator.) The second call and later calls recognise discarded gradients; this ends once a later batch has
  /// added to gradients that waited for a step. Call it at the boundary between two steps.
  ///
  /// Prepared optimizers report which parameters they step; if there is any prepared optimizer, parameters of no
  /// prepared optimizer are left out. For other optimizers, a change of any parameter counts as a step of all
  /// parameters; a step that changes next to nothing is not noticed.
  std::vector<at::Tensor> with_gradient_to_save() { return unstepped_.to_save(); }
  /// The weights that the gradients in .grad were multiplied by; for gradients of rounds in no_sync() that are not
  /// averaged yet.
  struct LocalWeights {
    double sum = 0;   ///< of the weights, each times `unit`
    double unit = 0;  ///< the same on all ranks
  };
  std::optional<LocalWeights> local_weights() const;
  /// True if local_weights() has a value; the same on all ranks.
  bool accumulates_with_weights() const noexcept { return weights_.given && last_round_was_no_sync(); }
  /// True if averages were moved out of .grad because rounds with weights add to it.
  bool has_averages_aside() const noexcept {
    return weights_.given && std::ranges::any_of(gradients_, [](const auto& own) { return own.earlier.defined(); });
  }
  /// Sets .grad to the gradients of a save, the same on all ranks, and removes .grad where the saved tensor is
  /// undefined. `saved`: by parameter; parameters that it does not list are left alone. `weights`: local_weights() when
  /// the gradients were saved.
  void restore_gradients(const std::map<const void*, at::Tensor>& saved, const std::optional<LocalWeights>& weights);
  /// For note_optimizer() and note_step().
  UnsteppedGradients& unstepped() noexcept { return unstepped_; }

 private:
  struct Round;
  /// The .grad of a parameter.
  struct Gradient {
    bool reached = false;  ///< true if the current round has made it
    bool fresh = false;    ///< true if .grad was undefined before the current round's gradient
    ParameterUse use = ParameterUse::unused;
    bool pending = false;  ///< true if .grad holds accumulated gradients that have not been averaged yet
    bool padding = false;  ///< true if all rounds that have added to .grad had weight 0
    /// With virtual workers, .grad as it was before the step; with given weights, the averages of earlier rounds. The
    /// new average is added to it.
    at::Tensor earlier = {};
    /// Inside join(): the averages that earlier rounds had left in .grad.
    at::Tensor averaged_before = {};
  };
  /// What join() has set for the next rounds, and the correction of the current one.
  struct Joined {
    std::function<Correction(bool averages)> before = {};  ///< empty outside join()
    bool keeps_averages = false;
    std::exception_ptr failure = {};
    Correction correction = {};
  };

  // A round: a backward() that adds to gradients of the module. An averaging round also averages them.
  void prepare_round(bool averages);
  std::shared_ptr<Round> begin_round();
  void begin_weights();
  void end_weights();
  bool any_pending_kept() const;
  void set_average_aside(std::size_t parameter);
  bool is_set_aside(std::size_t parameter) const;
  void set_earlier_gradients_aside();
  void restore_earlier_gradients() noexcept;
  void begin_exchanges(Arrival arrival, bool fused, bool takes_part = true);
  void keep_average(std::size_t parameter);
  void check_numbers(const ModelParameter& parameter);
  void add_remaining();
  using Reducers = std::vector<std::shared_ptr<Reducer>>;
  static std::shared_ptr<Reducers> ready_in_this_backward();
  static void finish_all(Reducers& ready);
  void finish_round();
  void finish_gradient(std::size_t parameter, bool fetch);
  void clear_gradient(std::size_t parameter);
  /// The use of .grad in a fused step: as in torch's optimizers, every parameter with a defined gradient takes part.
  ParameterUse use_in_step(std::size_t parameter) const;

  // For gradients that backward() leaves to a fused optimizer.
  void average_local_gradients();
  void before_own_change(std::size_t parameter);
  void give_gradients(Flags purpose, std::uint32_t word);
  void agree(Flags mine, bool begun);
  void end_exchange(bool fetch);

  // For rounds that an exception has ended.
  void copy_gradients() noexcept;
  void abandon_round();
  void finish_abandoned();

  int order_;  ///< see order()
  std::shared_ptr<const step::Steps> steps_;
  ModelParameters parameters_;
  ModelExchanges exchanges_;
  std::vector<Gradient> gradients_;  ///< [parameters]
  Rounds rounds_;
  GivenWeights weights_;
  LocalGradients local_;
  UnsteppedGradients unstepped_;
  Joined joined_;
  std::optional<std::string> bad_gradient_;  ///< see bad_gradient(); none if numbers are not watched
  std::weak_ptr<Round> round_;               ///< owned by autograd; expires when backward() has returned or thrown
};

}  // namespace muster::detail::gradients
