// Prepares a model over the ranks of a test without a session.
#pragma once

#include "comm/make_world.hpp"
#include "gradients/prepared_model.hpp"
#include "muster/process_group.hpp"
#include "support/world.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::test {

/// A communication hook that does what is done without one.
inline void average_bucket(GradBucket& bucket, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> tensors{bucket.gradients};
  group.allreduce(tensors)->wait();
}

/// True if the test uses that way of averaging.
inline bool by(const std::string& way) {
  const char* ways = std::getenv("MUSTER_TEST_EXCHANGE");
  return ways != nullptr && std::string(ways).find(way) != std::string::npos;
}

/// The ranks that average: all ranks of the test; with the way "nodes" each is told that it is alone on a node, with
/// "pairs" that the first node has one rank and each other node two. The first call is collective.
inline const Communicator& averaging_ranks() {
  static const Communicator ranks = [] {
    if (!by("nodes") && !by("pairs")) return world();
    detail::comm::Placement placement;
    for (int r = 0; r < world().size(); ++r) {
      placement.node_of_rank.push_back(by("nodes") ? r : (r + 1) / 2);
      placement.hosts.push_back(std::to_string(placement.node_of_rank.back()));
    }
    return detail::comm::make_world(world(), std::move(placement));
  }();
  return ranks;
}

/// The parts that a session gives to its models.
struct Preparation {
  /// The weight of the current batch.
  std::shared_ptr<detail::step::BatchWeight> weight =
      std::make_shared<detail::step::BatchWeight>(detail::step::BatchWeight{.total = world().size()});
  std::shared_ptr<detail::step::Steps> steps = std::make_shared<detail::step::Steps>();
  const std::int64_t scope = steps->enter_scope(weight);
  std::shared_ptr<int> no_sync_depth = std::make_shared<int>(0);
  detail::gradients::ParallelContext shared{.communicator = averaging_ranks(),
                                            .new_group = [] { return make_process_group(world()); },
                                            .steps = steps,
                                            .no_sync_depth = no_sync_depth,
                                            .share_memory = !by("buckets"),
                                            .share = {.total = world().size(), .first = world().rank()}};
  /// Small, so that a small model has several.
  ModelOptions options{.bucket_bytes = 64,
                       .first_bucket_bytes = 16,
                       .comm_hook = by("hook") ? CommHook(average_bucket) : CommHook(),
                       .progress_thread = by("threads")};

  std::shared_ptr<detail::gradients::PreparedModel> operator()(std::shared_ptr<torch::nn::Module> module) const {
    return detail::gradients::PreparedModel::prepare(std::move(module), shared, options);
  }
};

/// Values that differ by rank and by `seed`, the same in every run.
inline at::Tensor values(at::IntArrayRef sizes, double seed) {
  const auto count = at::empty(sizes).numel();
  return at::sin(at::arange(count, at::kDouble) * 1.7 + seed * 3.1 + world().rank() * 0.9).to(at::kFloat).view(sizes);
}

/// The sum over the ranks of share × tensor, in double precision. Collective.
inline at::Tensor weighted_sum(const at::Tensor& tensor, double share) {
  auto sum = (tensor.detach().to(at::kDouble) * share).contiguous();
  world().all_reduce(std::span(sum.mutable_data_ptr<double>(), static_cast<std::size_t>(sum.numel())));
  return sum;
}

inline at::Tensor mean_over_ranks(const at::Tensor& tensor) { return weighted_sum(tensor, 1.0 / world().size()); }

/// Collective.
inline void expect_same_bits_everywhere(const at::Tensor& tensor, const std::string& what) {
  const auto bytes = tensor.detach().contiguous().cpu();
  const auto of_rank =
      world().all_gather(std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
  for (const auto& other : of_rank) EXPECT_TRUE(other == of_rank[0]) << what;
}

inline void expect_close(const at::Tensor& have, const at::Tensor& want, const std::string& what) {
  ASSERT_TRUE(have.defined()) << what;
  ASSERT_EQ(have.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::allclose(have.to(at::kDouble), want.to(at::kDouble), 1e-5, 1e-6)) << what << ": have\n"
                                                                                    << have << "\nwant\n"
                                                                                    << want;
}

}  // namespace muster::test
