// Gradients of virtual workers: each micro-batch's are put aside, and those of all micro-batches are summed in the
// order of micro-batches.
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

/// ((s₀ + s₁) + s₂) + …, the same bits at any number of ranks. `micro_batches`: one flat tensor for each of this
/// rank's, which follow those of the ranks before it; of the same type and length everywhere. The first rank adds up
/// its own, every other goes on from what the one before it sends, and the last tells all. The sum, on every rank; of
/// half types in float. Collective.
at::Tensor ordered_sum(c10d::ProcessGroup& group, const std::vector<at::Tensor>& micro_batches);

/// One pass for each of the rank's micro-batches of a step; complete() after the last.
class OrderedExchange final : public Exchange {
 public:
  /// The process group serves this exchange alone.
  OrderedExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const step::Share& share, std::shared_ptr<const step::Steps> steps);

  void begin(Arrival arrival, Flags flags) override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  bool complete() const override { return complete_; }
  bool adds_up() const noexcept override { return true; }
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  /// Those of any of the step's micro-batches.
  Flags flags() const override;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  step::Share share_;
  std::shared_ptr<const step::Steps> steps_;
  std::vector<at::Tensor> parameters_;
  FlatLayout layout_;  ///< a bucket for each type and device
  /// [buckets][micro-batches of this rank]; one more bucket has each gradient's use, and the flags.
  std::vector<std::vector<at::Tensor>> micro_batches_;
  std::vector<at::Tensor> sums_;  ///< [buckets] over all micro-batches of all ranks; of gradients the averages
  std::size_t micro_batch_ = 0;   ///< of the pass under way
  std::size_t next_ = 0;          ///< that is missing in the step
  std::int64_t batch_ = 0;        ///< the last one that had a pass
  bool abandoned_ = false;        ///< an exception has ended that pass
  bool complete_ = true;
};

}  // namespace muster::detail::gradients
