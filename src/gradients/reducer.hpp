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
// - What zero_grad() has taken away is gone: no pass and no optimizer averages it.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/sample.hpp"
#include "muster/communicator.hpp"
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

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// Makes the exchange for these parameters. Collective.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(const std::vector<at::Tensor>& parameters)>;

  /// `total`: the shards of a step, of which a rank may have several. The gradients of sparse embeddings have an
  /// exchange of their own. `no_sync_depth` 0: gradients are averaged. Collective; install() makes it work.
  Reducer(std::shared_ptr<torch::nn::Module> module, int total, MakeExchange make_dense, MakeExchange make_sparse,
          std::shared_ptr<const step::Steps> steps, std::shared_ptr<const int> no_sync_depth);
  ~Reducer();

  /// Hooks this reducer into its module's parameters. Once.
  void install();

  /// An Error that names the first parameter that was moved, resized, replaced, added or removed since.
  void check_parameters() const;

  // For an optimizer that averages by itself: backward() then leaves this rank's own gradients in .grad, and the
  // optimizer takes them from the exchange. Sparse gradients are averaged in backward() all the same.
  void defer(bool deferred) noexcept { deferred_ = deferred; }
  /// What it works on, if the exchange offers that. Held weakly, it is gone when another exchange has come in place of
  /// this one, which an unfrozen parameter does.
  std::shared_ptr<FusableGradients> fusable() const { return {dense_, dense_->fusable()}; }
  /// The parameters that this exchange knows, in its order.
  std::vector<at::Tensor> exchanged() const;
  /// Averages what backward() has left to the optimizer, if it has. Collective.
  void settle();
  /// Gives the exchange what is in .grad now.
  void gather();
  /// The optimizer has done with it.
  void close();

  // The wish of a rank that all stop rides with every pass that is averaged.
  /// From the next pass on, `wishes_to_stop` says whether this rank does; it may be called by the thread that runs
  /// backward() or steps the optimizer.
  void ask(std::function<bool()> wishes_to_stop) { wishes_to_stop_ = std::move(wishes_to_stop); }
  /// Passes that have been averaged: with a fused optimizer in its step, with virtual workers after a step's last
  /// shard, else at the end of backward(). The same on all ranks, but for those that join() has made.
  std::int64_t passes() const noexcept { return passes_; }
  /// Whether any rank did, in the last of them. The same on all ranks.
  bool stop_wished() const noexcept { return stop_wished_; }

  // For ranks with different numbers of passes (join.cpp).
  /// From now on the ranks agree over `channel` before every pass that averages who still has one. The average is over
  /// those, or over all ranks if `over_all`.
  void join(Communicator channel, bool over_all);
  bool joined() const noexcept { return joined_.has_value(); }
  /// Takes part in a pass of the others, without a gradient. False when no rank has one any more. Collective.
  bool shadow();
  /// Ends what join() began, on this rank; the number of passes that it has averaged.
  std::int64_t part();
  /// The next backward() raises it.
  void fail(std::exception_ptr failure) noexcept { failure_ = std::move(failure); }

  // For a session that is to be saved between two passes.
  /// Finishes what exceptions have cut off, for which other ranks may wait. Collective where there is any.
  void recover();
  /// Whether an optimizer has stepped since the last backward(), or .grad is empty: whether nothing would be lost with
  /// the gradients. An optimizer that has changed next to nothing is not seen.
  bool spent() const;

  // Called by the hooks, on the thread that runs backward().
  /// What is to be added to the parameter's .grad in place of `gradient`.
  at::Tensor weigh(std::size_t parameter, const at::Tensor& gradient);
  /// The parameter's .grad has grown.
  void accumulated(std::size_t parameter);

 private:
  struct Parameter;
  struct Pass;
  /// Of a scope in which ranks have different numbers of passes.
  struct Joined {
    Communicator channel;
    bool over_all;
    std::int64_t passes = 0;  ///< of this rank
    std::int64_t active = 0;  ///< ranks that have the pass under way

    /// How many ranks have a pass now; 0 when all are done.
    std::int64_t agree(bool active_here);
  };

  void choose_parameters();
  std::vector<std::size_t> unfrozen() const;
  void take_in(const std::vector<std::size_t>& unfrozen);
  std::shared_ptr<Pass> begin();
  Flags flags() const;
  void begin_exchanges(Arrival arrival);
  Exchange& exchange_of(const Parameter& parameter) const noexcept;
  /// Whether backward() gives its gradients to the exchange.
  bool in_backward(const Parameter& parameter) const noexcept;
  void add(Parameter& parameter);
  void add_rest();
  void finish(Pass& pass);
  void count(Flags flags);
  using Complete = std::vector<std::pair<std::shared_ptr<Reducer>, std::shared_ptr<Pass>>>;
  static std::shared_ptr<Complete> complete_in_this_backward();
  static void finish_all(Complete& complete);
  int users(const Parameter& parameter) const;
  void store(Parameter& parameter, bool fetch);
  void put_aside(Parameter& parameter);
  void take_own_memory() noexcept;
  void cut_off();
  Sample sample() const;
  void leave();
  void drain();

  int order_;  ///< among all reducers, the same on all ranks
  std::shared_ptr<torch::nn::Module> module_;
  int total_;
  std::shared_ptr<const step::Steps> steps_;
  std::shared_ptr<const int> no_sync_depth_;

  std::vector<std::pair<std::string, const void*>> names_;  ///< each name and its tensor, as they were
  std::vector<Parameter> parameters_;                       ///< each tensor once
  MakeExchange make_dense_, make_sparse_;
  std::shared_ptr<Exchange> dense_;
  std::unique_ptr<Exchange> sparse_;  ///< none where there is no sparse parameter

  std::function<bool()> wishes_to_stop_;
  std::int64_t passes_ = 0;
  bool stop_wished_ = false;

  std::optional<Joined> joined_;
  std::exception_ptr failure_;

  std::optional<Sample> before_;  ///< the parameters when the last backward() began

  // The pass under way.
  std::weak_ptr<Pass> pass_;  ///< autograd owns it; it is gone when backward() has returned or thrown
  bool open_ = false;         ///< other ranks wait for gradients of this one
  bool begun_ = false;        ///< the exchanges have it
  bool dense_begun_ = false;  ///< the dense one too, which otherwise begins with the optimizer's step
  bool deferred_ = false;
  bool waiting_ = false;               ///< backward() has ended, and its gradients wait for the optimizer
  std::vector<std::size_t> unfrozen_;  ///< parameters that the pass under way is the first to train
  /// The same of passes that exceptions have cut off and that other ranks may wait for; the first may have begun.
  std::vector<std::vector<std::size_t>> owed_;
};

}  // namespace muster::detail::gradients
