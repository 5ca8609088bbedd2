// One operation of the process group.
#pragma once

#include "comm/collectives.hpp"
#include "comm/progress.hpp"
#include "group/buffer.hpp"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
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
///
/// In a group of torch.distributed (torch_backend.hpp), a thread also advances the operation if MPI allows several
/// threads, as long as the program holds the Work or a future of it. Calls on the Work are thread-safe. A failure is a
/// c10::DistBackendError. A future ends with such an error once the operation has exceeded its timeout.
class Work final : public c10d::Work {
 public:
  struct Options {
    c10d::OpType type;
    /// The operation's name in errors and in torch's profiler; must have static storage.
    const char* title;
    /// The timeout of a wait() that names none; if empty, the timeout of the communicator, by default the launch's.
    std::optional<std::chrono::milliseconds> timeout;
    std::uint64_t sequence_number = 0;
    bool for_torch = false;  ///< true in a group of torch.distributed
    bool is_async = true;    ///< false if the caller waits for it at once
  };
  /// `inputs` are only for torch's profiler.
  Work(int rank, const Options& options, const std::vector<at::Tensor>& inputs);

  const char* title() const noexcept { return options_.title; }
  /// "starting " and the title: the beginning of errors about arguments.
  std::string error_prefix() const;
  /// Keeps the tensor's memory until the operation ends. It is part of result() if it is written or `is_result`.
  Buffer& keep_buffer(const at::Tensor& tensor, Access access, bool is_result = false);
  /// Adds a part of the operation, which `start` starts. It may use the memory of earlier keep_buffer() calls. The
  /// operation ends when all its parts have ended.
  void add(std::function<comm::Request()> start) { planned_.push_back(std::move(start)); }
  /// Makes `step` the last step of the operation, and `result` its only result.
  void finish_by(std::function<void()> step, const at::Tensor& result);
  /// Starts all parts. Callers check arguments before, so that an Error about them comes before anything is sent.
  void start();

  bool isCompleted() override;
  /// Throws exception() if the operation ended with one, and an Error past the timeout. kNoTimeout: Options::timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  /// Ends the operation with an exception, on this rank only.
  void abort() override;
  /// The rank whose message a receive gets; for recvAnysource(), -1 before it has arrived.
  int sourceRank() const override;
  /// The tensors that the operation writes on this rank; of broadcast() and reduce(), the tensor on every rank.
  std::vector<at::Tensor> result() override { return results_; }
  std::uint64_t getSequencenumber() const override { return options_.sequence_number; }
  /// Returns a future of result(). Waits for the end, unless a thread advances the operation: torch's Future is final
  /// and its wait() only sleeps, so waiting for an incomplete future would never advance the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  /// Returns the lock that is held while an operation starts or advances; outside of torch.distributed, an empty one.
  std::unique_lock<std::mutex> lock() const;
  /// Call it under lock(). True if this call has found the operation at its end; then call end(), without the lock.
  bool advance();
  /// Frees the memory, and completes the Work and its future.
  void end();
  void fail(std::exception_ptr failure);
  /// Has a thread advance this operation. False if there is no such thread, as below MPI_THREAD_MULTIPLE.
  bool start_in_background();
  bool has_future() const;
  comm::Request* pending_part();
  std::string waiting() const { return std::string("waiting for ") + options_.title; }

  const Options options_;
  std::vector<std::function<comm::Request()>> planned_;
  std::vector<comm::Request> parts_;
  std::shared_ptr<std::deque<Buffer>> buffers_;
  std::vector<at::Tensor> results_;
  std::function<void()> last_step_;
  bool is_over_ = false;  ///< true if advance() has returned true, or the operation has failed
  std::exception_ptr failure_;
  const std::chrono::steady_clock::time_point created_ = std::chrono::steady_clock::now();
  // Only in a group of torch.distributed:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  c10::intrusive_ptr<Work> self_;  ///< keeps this Work alive until its future is complete
  bool is_in_background_ = false;
};

}  // namespace muster::detail::group
