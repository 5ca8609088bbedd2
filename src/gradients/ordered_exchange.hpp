// Averages gradients for virtual workers: stores the gradients of each micro-batch, and sums them at the end of a step
// in the order of micro-batches, whichever rank has computed them.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/flat_layout.hpp"
#include "step/steps.hpp"

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace muster::detail::gradients {

/// Returns ((s₀ + s₁) + s₂) + … on every rank, with the same bits at any number of ranks; half types are summed in
/// float. `micro_batches`: the summands of this rank, one flat tensor per micro-batch. They follow the summands of
/// lower ranks; all have the same type and length. The first rank sums its own tensors, each next rank adds its own to
/// the sum that the previous rank sends, and the last rank broadcasts the result. Collective.
at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches);

/// A step has one round for each micro-batch of this rank. is_step_complete() is true after the last of these rounds.
class OrderedExchange final : public Exchange {
 public:
  /// The process group must serve this exchange only.
  OrderedExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const step::MicroBatchShare& share, std::shared_ptr<const step::Steps> steps);

  void finish() override;
  bool is_step_complete() const override { return complete_; }
  bool takes_several_rounds() const noexcept override { return true; }
  void fetch(std::size_t index, at::Tensor& gradient) override;

 private:
  void begin_round() override;
  void add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  step::MicroBatchShare share_;
  std::shared_ptr<const step::Steps> steps_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;  ///< one bucket for each type and device
  /// [buckets][micro-batches of this rank]. A last, additional bucket holds the notes.
  std::vector<std::vector<at::Tensor>> micro_batches_;
  std::vector<at::Tensor> reduced_;  ///< [buckets of layout_]: averages over all micro-batches
  std::size_t micro_batch_ = 0;      ///< the micro-batch of the current round
  std::size_t next_ = 0;             ///< the micro-batch that the next round should have
  std::int64_t batch_ = 0;           ///< number of the batch that the last round was for
  bool abandoned_ = false;           ///< true if an exception has ended the last round
  bool complete_ = true;
};

}  // namespace muster::detail::gradients
