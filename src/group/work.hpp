// One operation of the process group under way.
#pragma once

#include "comm/collectives.hpp"
#include "group/buffer.hpp"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::group {

/// It makes progress only while this process waits for something: inside isCompleted(), wait(), synchronize() and
/// getFuture(), its own or another's, of any group. Where one of its own finds it finished, the last step (averaging,
/// copying back) runs, once. Dropped before that, it is left to itself: the
/// tensors live until nobody writes to them any more, and what they hold is not defined.
///
/// What another rank has raised ends it, and stays its exception(). A wait() past its limit throws and leaves it under
/// way: it may be waited for again.
class Work final : public c10d::Work {
 public:
  /// `title`: the operation's name in errors and in torch's profiler, of static storage. `limit`: of a wait() without;
  /// else that of the launch.
  Work(int rank, c10d::OpType type, const char* title, std::optional<std::chrono::milliseconds> limit);

  /// "starting " and the title, as errors about what was given begin.
  std::string starting() const;
  /// The tensor's memory until the end; what is written is part of result().
  Buffer& hold(const at::Tensor& tensor, Access access);
  /// A part of the operation, which uses memory that was held before: `start` starts it. The operation ends when all of
  /// its parts have.
  void add(std::function<comm::Request()> start) { planned_.push_back(std::move(start)); }
  /// Starts all parts. What cannot be done is refused before: then nothing has been sent or written.
  void start();

  bool isCompleted() override;
  /// Throws the exception() it ended with. kNoTimeout stands for the limit of the operation.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  /// Ends it on this rank alone, with an exception.
  void abort() override;
  /// The rank that a receive heard; -1 before it has finished.
  int sourceRank() const override;
  /// The tensors that the operation writes on this rank.
  std::vector<at::Tensor> result() override { return results_; }
  /// A future of result() that is completed: this waits for the end. c10d's Future is final and its wait() only
  /// sleeps, so that nobody would make progress while it is waited for.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const char* title_;
  std::optional<std::chrono::milliseconds> limit_;
  std::vector<std::function<comm::Request()>> planned_;
  std::vector<comm::Request> parts_;
  std::shared_ptr<std::deque<Buffer>> buffers_;
  std::vector<at::Tensor> results_;
};

}  // namespace muster::detail::group
