// Copies gradients into flat buckets and averages each bucket by one all-reduce of a process group. All ranks start the
// all-reduces in the order of the buckets, each as soon as its bucket is full. With a communication hook, the hook
// averages the gradients instead: finish() calls it for each bucket, since it may wait for other ranks.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/flat_layout.hpp"
#include "muster/communicator.hpp"
#include "muster/model.hpp"

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace muster::detail::gradients {

/// The process group has the communicator's ranks and serves this exchange only: in one backward(), the buckets of two
/// models may start in different orders on different ranks.
class BucketExchange final : public Exchange {
 public:
  /// Collective.
  BucketExchange(const std::vector<at::Tensor>& parameters, Communicator communicator,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, const ModelOptions& options);
  ~BucketExchange() override;

  void finish() override;
  void fetch(std::size_t index, at::Tensor& gradient) override;

 private:
  struct Bucket;

  void begin_round() override;
  void add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) override;
  void for_notes_of(std::size_t bucket, const std::function<void(float& number)>& call);
  void fill_buckets(const std::vector<std::size_t>& order);
  void start_full_buckets();
  void advance();
  void fix_order();

  Communicator communicator_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ModelOptions options_;
  at::Tensor scale_;  ///< 1 / number of ranks
  std::vector<at::Tensor> parameters_;
  FlatLayout types_;                    ///< groups the parameters by type and device
  std::vector<at::Tensor> memory_;      ///< for each type and device, the memory of all its buckets
  FlatLayout layout_;                   ///< the slices of the parameters in buckets_
  std::vector<Bucket> buckets_;         ///< in the order in which they start
  std::size_t started_ = 0;             ///< number of buckets whose all-reduce has started
  std::size_t ended_ = 0;               ///< number of buckets whose all-reduce is known to have ended
  std::vector<std::size_t> new_order_;  ///< for the next round; empty if the order stays as it is
};

}  // namespace muster::detail::gradients
