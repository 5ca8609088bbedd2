// Batches that are made before they are asked for.
#pragma once

#include "muster/dataset.hpp"

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

namespace muster::detail::data {

/// Calls `produce` until it gives none, up to `ahead` batches before they are asked for, on a thread of its own; with 0
/// when they are asked for, on the caller's.
class Prefetch {
 public:
  using Produce = std::function<std::optional<Batch>()>;

  Prefetch(Produce produce, int ahead);
  /// Waits for the call under way, drops what nobody asked for.
  ~Prefetch();
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  /// The next batch, none at the end. Throws what `produce` has thrown, after the batches made before; nothing comes
  /// after that.
  std::optional<Batch> next();

 private:
  void run();

  const Produce produce_;
  const std::size_t ahead_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> ready_;
  std::exception_ptr error_;
  bool finished_ = false;  ///< nothing more will be produced
  bool leaving_ = false;
  std::thread thread_;
};

}  // namespace muster::detail::data
