// Data parallelism: options of session.prepare_model, and the scopes that belong to it.
#pragma once

#include <muster/comm_hooks.hpp>

#include <cstddef>
#include <memory>
#include <utility>

namespace muster {

enum class Parallel {
  data,  ///< the same weights on all ranks, gradients averaged in backward()
  none,  ///< only moved to the device
};

struct ModelOptions {
  Parallel parallel = Parallel::data;
  /// Gradients travel in buckets of at most this many bytes (a larger one alone), about in the order in which
  /// backward() makes them.
  std::size_t bucket_bytes = std::size_t{25} << 20;
  /// The first bucket, which is ready early.
  std::size_t first_bucket_bytes = std::size_t{1} << 20;
  /// How a bucket is averaged, in place of a plain sum; see muster/comm_hooks.hpp. Gradients then do not go through
  /// node-shared memory, and optimizers are not fused.
  CommHook comm_hook = {};
};

/// While it lives, backward() adds up gradients on this rank alone; the first backward() after it averages the sum.
/// Each gradient is weighted by the samples of its own batch when it is added, so batches may be uneven. On every rank
/// alike.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<int> depth) : depth_(std::move(depth)) { ++*depth_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;
  ~NoSync() { --*depth_; }

 private:
  std::shared_ptr<int> depth_;
};

}  // namespace muster
