// Gradients of virtual workers: stores the gradients of each micro-batch, and at the end of a step sums them over all
// micro-batches, in the order of micro-batches.
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
/// float. `micro_batches`: one flat tensor for each micro-batch of this rank, which follow those of lower ranks; all of
/// the same type and length on all ranks. The first rank sums its own, each next rank adds its own to the sum that the
/// previous one sends, and the last rank broadcasts the result. Collective.
at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches);

/// A step has one round for each of this rank's micro-batches; is_step_complete() is true after the last.
class OrderedExchange final : public Exchange {
 public:
  /// The process group must serve this exchange only.
  OrderedExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const step::MicroBatchShare& share, std::shared_ptr<const step::Steps> steps);

  void begin(Arrival arrival, Flags flags, double weight) override;
  void add(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;
  void finish() override;
  bool is_step_complete() const override { return complete_; }
  bool takes_several_rounds() const noexcept override { return true; }
  int user_count(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  /// The flags of all the step's micro-batches, joined by OR.
  Flags flags() const override;
  double mean_weight() const override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  step::MicroBatchShare share_;
  std::shared_ptr<const step::Steps> steps_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;  ///< one bucket for each type and device
  /// [buckets][micro-batches of this rank]; one more bucket holds the use of each gradient, flags and weight.
  std::vector<std::vector<at::Tensor>> micro_batches_;
  std::vector<at::Tensor> reduced_;  ///< [buckets] over all micro-batches: gradients averaged, the rest summed
  std::size_t micro_batch_ = 0;      ///< of the current round
  std::size_t next_ = 0;             ///< the step's next micro-batch
  std::int64_t batch_ = 0;           ///< number of the last batch that had a round
  bool abandoned_ = false;           ///< true if an exception has ended that round
  bool complete_ = true;
};

}  // namespace muster::detail::gradients
