// Gradients of virtual workers: each shard's are put aside, and those of all shards are summed in the order of shards.
#pragma once

#include "gradients/exchange.hpp"
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

/// One pass for each of the rank's shards of a step; complete() after the last.
class OrderedExchange final : public Exchange {
 public:
  /// The process group serves this exchange alone.
  OrderedExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                  const step::Share& share, std::shared_ptr<const step::Steps> steps);

  void begin(Arrival arrival, Flags flags) override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  bool complete() const override { return complete_; }
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  /// What was given with any of the step's shards.
  Flags flags() const override;

 private:
  /// The gradients of one type.
  struct Kind {
    at::TensorOptions options;
    std::int64_t elements = 0;
    std::vector<at::Tensor> shards = {};  ///< of this rank
    at::Tensor sum = {};
  };
  struct Place {
    std::size_t kind = 0;
    std::int64_t first = 0;
    at::Tensor parameter = {};
  };
  at::Tensor part(const at::Tensor& flat, const Place& place) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  step::Share share_;
  std::shared_ptr<const step::Steps> steps_;
  std::vector<Kind> kinds_;    ///< the last one counts users, and who has given each bit of a note
  std::vector<Place> places_;  ///< [parameters]
  std::size_t shard_ = 0;      ///< of the pass under way
  std::size_t next_ = 0;       ///< that is missing in the step
  std::int64_t batch_ = 0;     ///< the last one that had a pass
  bool left_ = false;          ///< that pass was cut off by an exception
  bool complete_ = true;
};

}  // namespace muster::detail::gradients
