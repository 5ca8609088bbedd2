// Gradients copied into flat buckets, each averaged by one all-reduce of a process group as soon as it is full and all
// before it are on their way; or by the communication hook, at the end, since a hook may wait for other ranks.
#pragma once

#include "model/exchange.hpp"
#include "muster/model.hpp"

#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace muster::model {

/// The process group serves this exchange alone: the buckets of two models in one backward() may start in different
/// orders on different ranks.
class BucketExchange final : public Exchange {
 public:
  BucketExchange(const std::vector<at::Tensor>& parameters, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 const ModelOptions& options);
  ~BucketExchange() override;

  void begin() override;
  void add(std::size_t index, const at::Tensor& gradient, Use use) override;
  void finish() override;
  int users(std::size_t index) const override;
  void fetch(std::size_t index, at::Tensor& gradient) override;

 private:
  struct Place {
    std::size_t bucket = 0;
    std::size_t number = 0;  ///< in the bucket
    at::Tensor values = {};  ///< in the bucket, in the parameter's shape
  };
  struct Bucket;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  CommHook hook_;
  at::Tensor scale_;  ///< 1 / world
  std::vector<Place> places_;
  std::vector<Bucket> buckets_;
  std::size_t issued_ = 0;  ///< buckets, from the first
};

}  // namespace muster::model
