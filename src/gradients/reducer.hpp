// Averages the gradients of one module over the ranks, inside backward().
//
// Hooks in the parameters call it. A gradient is weighted by the rank's samples before it is added to .grad, and given
// to the exchange afterwards; at the end of backward() the averages are fetched. Since what lies in .grad is weighted
// already, it may have been added up over several passes, with or without averaging in between: the average of the sum
// is right.
//
// The contract:
// - All ranks run the same backward passes over the module, in the same order. In a pass each rank reaches at least one
//   parameter; which ones may differ. A rank that reaches none never calls the reducer, and the others end with the
//   time limit. Of several models, each rank may come to another one first.
// - Parameters are frozen and unfrozen on all ranks alike. One that was frozen from the start costs nothing until it is
//   unfrozen.
// - An exception in backward() leaves something between this rank's gradients and the averages in .grad; zero_grad()
//   and go on, on all ranks alike. A rank that goes on where others had no exception is an error on those.
//   With virtual workers .grad is again what it was before the step.
// - What zero_grad() has taken away is gone: no pass and no optimizer averages it.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/fingerprint.hpp"
#include "step/steps.hpp"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
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

/// An optimizer that averages gradients by itself, fused with its step (optim/optimizer_step.cpp).
class FusedOptimizer {
 public:
  /// Another optimizer is fused in its place.
  virtual void end_fusing() noexcept = 0;
  /// A backward() begins though the step for the one before has not come; an exception may have ended that one.
  virtual void another_pass() = 0;

 protected:
  ~FusedOptimizer() = default;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Makes the exchange for these parameters. Collective.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(const std::vector<at::Tensor>& parameters)>;

  /// The gradients of sparse embeddings have an exchange of their own. Collective; install() makes it work.
  Reducer(std::shared_ptr<torch::nn::Module> module, const ParallelContext& context, MakeExchange make_dense,
          MakeExchange make_sparse);
  ~Reducer();

  /// Hooks this reducer into its module's parameters. Once.
  void install();

  /// An Error that names the first parameter that was moved, resized, replaced, added or removed since.
  void check_parameters() const;
  /// An Error that names the first parameter that has another shape, type or device since. In less time than that.
  void check_shapes() const;

  // Called by the hooks, on the thread that runs backward().
  /// What is to be added to the parameter's .grad in place of `gradient`.
  at::Tensor before_accumulation(std::size_t parameter, const at::Tensor& gradient);
  /// The parameter's .grad has grown.
  void after_accumulation(std::size_t parameter);

  /// Passes that have been averaged: with a fused optimizer in its step, with virtual workers after a step's last
  /// micro-batch, else at the end of backward(). The same on all ranks, but for passes without gradients.
  std::int64_t passes() const noexcept { return passes_; }
  /// Whether a step is half done: with virtual workers, before its last micro-batch.
  bool amid_step() const noexcept { return !steps_->complete(); }
  /// Whether any rank had been asked to stop when the last of them began. The same on all ranks.
  bool any_stop_requested() const noexcept { return any_stop_requested_; }

  // For an optimizer that averages by itself: backward() then leaves this rank's own gradients in .grad, and the
  // optimizer takes them from the exchange. Sparse gradients are averaged in backward() all the same.
  /// That optimizer from now on; null: backward() averages. Whoever was it before is told.
  void set_fused(FusedOptimizer* optimizer) noexcept;
  bool fused() const noexcept { return fused_ != nullptr; }
  /// No longer once a parameter was unfrozen, which brings another exchange.
  bool fused_by(const FusedOptimizer* optimizer) const noexcept { return fused_ == optimizer; }
  /// What it works on, if the exchange offers that. Held weakly, it is gone when another exchange has come in place of
  /// this one, which an unfrozen parameter does.
  std::shared_ptr<FusableGradients> fusable() const { return {dense_, dense_->fusable()}; }
  /// The parameters that this exchange knows, in its order.
  std::vector<at::Tensor> dense_parameters() const;
  /// Gives the exchange what is in .grad now, with a word for the other ranks (FusableGradients::words_agree). It is
  /// for the optimizer to finish it.
  void begin_step(std::uint32_t word);
  /// The optimizer has finished the exchange, and has stepped with `scale` times the averages. An Error, the same on
  /// all ranks, if a rank had abandoned the pass, or if .grad was changed by hand since backward(): then the optimizer
  /// has written nothing.
  void end_step(double scale);
  /// Whether backward() has left gradients to the optimizer.
  bool awaits_step() const noexcept { return state_ == State::awaiting_step; }
  /// For all others that read gradients: where .grad holds this rank's own, it gets the averages. An Error as in
  /// end_step(). Collective.
  void fetch_averages();
  /// Where passes in no_sync() are the last ones, this is the one that averages what they have added up; with a fused
  /// optimizer the dense gradients await its step. Collective.
  void end_adding_up();
  /// Whether the last pass was one in no_sync().
  bool adds_up() const noexcept { return added_up_; }
  /// end_adding_up() also where the last pass was another one, since other ranks have more to average. Collective.
  void end_adding_up_on_all();
  /// Muster itself is about to change the .grad, on all ranks alike: what was changed by hand until now is noted.
  void allow_change();

  // For who wants to know of NaN and infinite numbers.
  /// From now on the small gradients of this rank are looked at as they are made.
  void watch_numbers() noexcept { watches_numbers_ = true; }
  /// The first of them that was bad, by its parameter, and has not been made anew since; empty: none.
  const std::string& bad_gradient() const noexcept { return bad_gradient_; }
  /// Empty for what is no parameter of the module.
  std::string name_of(const at::Tensor& parameter) const;
  /// Whether its gradients are averaged.
  bool averages(const at::Tensor& parameter) const;
  /// What the gradients of the batch that counts are multiplied by before they are averaged.
  double weight() const { return steps_->weight(); }
  /// Among all reducers, the same on all ranks.
  int order() const noexcept { return order_; }

  // For ranks with different numbers of passes (join.cpp).
  /// What makes a pass's averages right although some ranks have none: they are multiplied by `scale`; then what
  /// earlier passes had averaged into .grad, times `earlier`, is added.
  struct Correction {
    double scale = 1;
    double earlier = 0;
  };
  /// `before` is called as every backward() begins, and told whether it averages. What it throws, backward() throws. An
  /// empty one ends that. `keeps_averages`: there may be an `earlier`, for which averages are copied before they grow.
  void before_each_pass(std::function<Correction(bool averages)> before, bool keeps_averages = false) {
    before_pass_ = std::move(before);
    keeps_averages_ = keeps_averages;
  }
  bool joined() const noexcept { return before_pass_ != nullptr; }
  /// Whether a parameter is to be trained that no pass has trained before.
  bool unfreezes() const { return !unfrozen().empty(); }
  /// Takes part in a pass of the other ranks. Collective.
  void pass_without_gradients();
  /// The next backward() raises it.
  void fail(std::exception_ptr failure) noexcept { failure_ = std::move(failure); }

  // For a session that is to be saved between two passes.
  /// Finishes what exceptions have cut off, for which other ranks may wait. Collective where there is any.
  void recover();
  /// Whether nothing would be lost with the gradients that are in .grad: optimizers have stepped with them since the
  /// last backward(), or the program throws such gradients away, as a GAN does with those that the discriminator gets
  /// from the generator's loss. That is known from the second time on that it is asked, at a boundary each.
  ///
  /// Prepared optimizers say what they step; what none of them has stepped counts for nothing then. Of others a change
  /// of any parameter is taken for a step of all; one that changes next to nothing is not seen.
  bool stepped();
  /// A prepared optimizer has stepped the parameter, or has left the step out; `optimizer` lives as long as it.
  void note_step(std::size_t parameter, const std::weak_ptr<const void>& optimizer);

 private:
  struct Parameter;
  struct Pass;

  /// What other ranks may expect of this one. A pass is a backward() that averages.
  ///
  ///   idle           a gradient of a new pass   -> collecting; or postponed, where abandoned passes are to be finished
  ///                                                before, or exchanges to be made that know unfrozen parameters
  ///                  one in no_sync()           -> idle: it is only added up, until end_adding_up()
  ///                  a fused optimizer's step   -> idle: it averages what is in .grad
  ///                  fetch_averages()           -> idle: it averages what is in .grad, if that is this rank's own
  ///   collecting     more gradients             -> collecting: the exchanges get them as they are made
  ///                  the end of backward()      -> idle, with the averages in .grad; with virtual workers, before the
  ///                                                step's last micro-batch, with nothing there
  ///                                             -> awaiting_step, if an optimizer is fused: .grad is this rank's own,
  ///                                                and stays so after the step, until fetch_averages()
  ///   postponed      more gradients             -> postponed: they are only added up
  ///                  the end of backward()      -> collecting, all at once, when abandoned passes are finished
  ///   awaiting_step  the step                   -> idle
  ///                  fetch_averages()           -> idle: .grad holds the averages, which the step may average again
  ///                  a gradient of a new pass   -> collecting or postponed: the step averages the sum
  ///                  one in no_sync()           -> awaiting_step
  ///
  /// No optimizer is fused any more when the one that was is destroyed, or when a pass trains a parameter for the first
  /// time. That pass averages in backward(); if .grad is still this rank's own as it begins, .grad counts as pending.
  ///
  /// An exception, at whatever line of backward(), destroys the Pass and leaves the state at collecting or postponed.
  /// What comes next, a gradient, a step, the end of join() or recover(), abandons that pass: -> idle. The others hear
  /// of it at the end of that pass, which goes on without this rank's gradients; this rank finishes it when it waits
  /// for them anyway. An exception from there, or from the exchanges, finds the state as after the pass.
  ///
  /// Of several models in one backward() each has its state. All give their gradients before the first is finished, in
  /// the order of prepare_model, since they may begin in another order on each rank. autograd::grad() adds to no .grad,
  /// and so is no pass. A frozen parameter takes part with what is in its .grad.
  enum class State { idle, collecting, postponed, awaiting_step };

  /// A pass that an exception has cut off and that other ranks may wait for.
  struct Abandoned {
    std::vector<std::size_t> unfrozen;
    bool begun;  ///< the exchanges have it
  };

  // The parameters that are exchanged.
  std::vector<std::size_t> unfrozen() const;
  void extend_exchanges(const std::vector<std::size_t>& unfrozen);
  Exchange& exchange_of(const Parameter& parameter) const noexcept;

  // A gradient's way.
  void prepare_pass(bool averages);
  std::shared_ptr<Pass> begin_pass();
  void take_earlier();
  void restore_earlier() noexcept;
  void begin_exchanges(Arrival arrival);
  Flags flags() const;
  /// Whether the pass that the exchanges have begun is to bring its average.
  bool in_backward(const Parameter& parameter) const noexcept;
  void look_at(const Parameter& parameter);
  void keep_average(Parameter& parameter) const;
  void add(Parameter& parameter);
  void add_rest();
  void add_nothing(Use use);
  using Complete = std::vector<std::shared_ptr<Reducer>>;
  static std::shared_ptr<Complete> complete_in_this_backward();
  static void finish_all(Complete& complete);
  void finish_pass();
  void finish_exchanges();
  Flags flags_of_all() const;
  void count_pass(Flags flags);
  int users(const Parameter& parameter) const;
  void store(Parameter& parameter, bool fetch);
  void put_aside(Parameter& parameter);

  // Of this rank's own gradients, left to a fused optimizer.
  void average_own();
  void mark_gradients();
  void note_change(Parameter& parameter);
  void give_gradients(std::uint32_t word);
  void end_exchange(bool fetch);
  [[noreturn]] void throw_changed();

  // After an exception.
  void take_own_memory() noexcept;
  void abandon_pass();
  void finish_abandoned();

  // Whether gradients wait for a step.
  Fingerprint fingerprint() const;
  void note_change_of_parameters();
  void note_dropped();

  int order_;  ///< among all reducers, the same on all ranks
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<const step::Steps> steps_;
  std::shared_ptr<const int> no_sync_depth_;
  std::function<bool()> stop_requested_;

  std::vector<std::pair<std::string, const void*>> names_;  ///< each name and its tensor, as they were
  std::vector<Parameter> parameters_;                       ///< each tensor once
  MakeExchange make_dense_, make_sparse_;
  std::shared_ptr<Exchange> dense_;
  std::unique_ptr<Exchange> sparse_;  ///< none where there is no sparse parameter

  FusedOptimizer* fused_ = nullptr;
  bool own_ = false;       ///< .grad of dense parameters holds this rank's own gradients, left to a fused optimizer
  bool added_up_ = false;  ///< the last pass was in no_sync(); the same on all ranks
  bool begun_since_step_ = false;  ///< a pass that averages, since the fused optimizer's last step or fetch_averages()
  bool watches_numbers_ = false;
  std::string bad_gradient_;
  std::int64_t passes_ = 0;
  bool any_stop_requested_ = false;
  std::function<Correction(bool averages)> before_pass_;
  bool keeps_averages_ = false;
  std::exception_ptr failure_;
  std::optional<Fingerprint> passed_;  ///< of the parameters when the last backward() was over
  bool any_left_ = false;              ///< gradients, when stepped() was asked for the last time

  State state_ = State::idle;
  std::vector<Abandoned> abandoned_;  ///< only the first may have begun

  // The pass under way.
  std::weak_ptr<Pass> pass_;           ///< autograd owns it; it is gone when backward() has returned or thrown
  std::vector<std::size_t> unfrozen_;  ///< parameters that it is the first to train
  bool dense_in_backward_ = false;  ///< the dense exchange has begun too, which else begins with the optimizer's step
  Correction correction_;           ///< of the averages
};

}  // namespace muster::detail::gradients
