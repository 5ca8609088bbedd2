// One operation of the process group.
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

/// The operation advances only inside isCompleted(), wait(), synchronize() and getFuture() of any Work of this process,
/// in any group. When one of these calls on this Work finds that it has finished, the last step (averaging, copying
/// back) runs, once. If the Work is dropped before that, the operation still ends: the tensors live until nobody writes
/// to them any more, and their contents are undefined.
///
/// An error on another rank ends the operation and becomes its exception(). A wait() that exceeds its timeout throws,
/// but does not end the operation: it may be waited for again.
class Work final : public c10d::Work {
 public:
  /// `title`: the operation's name in errors and in torch's profiler; must have static storage. `timeout`: that of a
  /// wait() that names none; if empty, that of the launch.
  Work(int rank, c10d::OpType type, const char* title, std::optional<std::chrono::milliseconds> timeout);

  /// "starting " and the title: the beginning of errors about arguments.
  std::string error_prefix() const;
  /// Keeps the tensor's memory until the operation ends. A tensor that is written becomes part of result().
  Buffer& keep_buffer(const at::Tensor& tensor, Access access);
  /// Adds a part of the operation, which `start` starts. It may use memory that was held before. The operation ends
  /// when all its parts have ended.
  void add(std::function<comm::Request()> start) { planned_.push_back(std::move(start)); }
  /// Starts all parts. Callers check arguments before, so that an Error about them comes before anything is sent.
  void start();

  bool isCompleted() override;
  /// Throws exception() if the operation ended with one. kNoTimeout means the timeout of the operation.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  /// Ends the operation with an exception, on this rank only.
  void abort() override;
  /// The rank whose message was received; -1 before it has arrived.
  int sourceRank() const override;
  /// The tensors that the operation writes on this rank.
  std::vector<at::Tensor> result() override { return results_; }
  /// Waits for the end and returns a completed future of result(). A future that is not completed would not work:
  /// c10d's Future is final and its wait() only sleeps, so the operation would not advance.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const char* title_;
  std::optional<std::chrono::milliseconds> timeout_;
  std::vector<std::function<comm::Request()>> planned_;
  std::vector<comm::Request> parts_;
  std::shared_ptr<std::deque<Buffer>> buffers_;
  std::vector<at::Tensor> results_;
};

}  // namespace muster::detail::group
