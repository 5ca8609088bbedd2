// Gradients copied into flat buckets, each averaged by one all-reduce of a process group as soon as it is full and all
// before it are on their way; or by the communication hook, at the end, since a hook may wait for other ranks.
#pragma once

#include "gradients/exchange.hpp"
#include "gradients/flat_layout.hpp"
#include "gradients/progress_thread.hpp"
#include "muster/communicator.hpp"
#include "muster/model.hpp"

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace muster::detail::gradients {

/// The process group, over the ranks of the communicator, serves this exchange alone: the buckets of two models in one
/// backward() may start in different orders on different ranks.
class BucketExchange final : public Exchange {
 public:
  /// With `progress_thread` a second thread makes the all-reduces advance while backward() computes, for a process
  /// group that does not by itself; its work must then bear several threads (of MPI, MPI_THREAD_MULTIPLE). Collective.
  BucketExchange(const std::vector<at::Tensor>& parameters, Communicator communicator,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, const ModelOptions& options, bool progress_thread);
  ~BucketExchange() override;

  void begin(Arrival arrival, Flags flags) override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;
  Flags flags() const override;

 private:
  struct Bucket;

  void fill_buckets();
  void start_full_buckets();
  /// Makes the all-reduces under way advance; whether the oldest has ended.
  bool advance();
  void freeze_order();

  Communicator communicator_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  CommHook hook_;
  std::size_t first_bytes_, most_bytes_;  ///< of a bucket
  at::Tensor scale_;                      ///< 1 / world
  std::vector<at::Tensor> parameters_;
  FlatLayout types_;                ///< a bucket for each type and device
  std::vector<at::Tensor> memory_;  ///< [buckets of types_], for those of layout_
  std::vector<std::size_t> order_;  ///< of parameters, in which gradients are expected
  FlatLayout layout_;               ///< a bucket for each of buckets_
  std::vector<Bucket> buckets_;     ///< in the order in which they start
  std::size_t issued_ = 0;          ///< buckets, from the first
  std::size_t ended_ = 0;           ///< of them, as far as is known

  Arrival arrival_ = Arrival::at_once;
  std::vector<std::int64_t> arrived_;  ///< indices, as they came in this pass
  bool frozen_ = false;                ///< the order
  bool moved_ = false;                 ///< it has changed since the buckets were filled

  std::unique_ptr<ProgressThread> thread_;  ///< goes first
};

}  // namespace muster::detail::gradients
