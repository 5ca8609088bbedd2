#include "group/work.hpp"

#include "base/text.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

namespace muster::detail::group {
namespace {

/// Converts a muster::Error into torch's DistBackendError; returns other exceptions as they are. `late`: true if the
/// operation has exceeded its timeout.
std::exception_ptr as_torchs(const std::exception_ptr& failure, bool late) try {
  std::rethrow_exception(failure);
} catch (const Error& error) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
                            str(late ? "an operation has reached its timeout while " : "", error.what())));
} catch (...) {
  return failure;
}

}  // namespace

Work::Work(int rank, const Options& options, const std::vector<at::Tensor>& inputs)
    : c10d::Work(rank, options.type, options.title, inputs),
      options_(options),
      buffers_(std::make_shared<std::deque<Buffer>>()) {
  if (options.for_torch) future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
}

std::string Work::error_prefix() const { return str("starting ", options_.title); }

Buffer& Work::keep_buffer(const at::Tensor& tensor, Access access, bool is_result) {
  auto& buffer = buffers_->emplace_back(tensor, access, error_prefix());
  if (is_result || access != Access::read) results_.push_back(tensor);
  return buffer;
}

void Work::finish_by(std::function<void()> step, const at::Tensor& result) {
  last_step_ = std::move(step);
  results_ = {result};
}

std::unique_lock<std::mutex> Work::lock() const {
  return options_.for_torch ? std::unique_lock(comm::operation_mutex()) : std::unique_lock<std::mutex>();
}

void Work::start() {
  {
    const auto held = lock();
    if (options_.for_torch) comm::require_progress("starting ", title());
    for (const auto& start : std::exchange(planned_, {})) parts_.emplace_back(start()).keep(buffers_);
  }
  if (options_.for_torch && options_.is_async && !isCompleted()) start_in_background();
}

bool Work::has_future() const {
  const std::lock_guard held(mutex_);
  return self_.defined();
}

bool Work::advance() {
  if (is_over_) return false;
  bool late = false;
  try {
    if (options_.for_torch) comm::require_progress("waiting for ", title());
    if (!std::all_of(parts_.begin(), parts_.end(), [](comm::Request& part) { return part.done(); })) {
      if (!has_future() || !options_.timeout || std::chrono::steady_clock::now() - created_ < *options_.timeout)
        return false;
      late = true;
      std::ranges::find_if(parts_, &comm::Request::pending)->fail_after(*options_.timeout, waiting());
    }
    for (auto& buffer : *buffers_) buffer.finish();
    if (last_step_) last_step_();
  } catch (...) {
    failure_ = std::current_exception();
    if (options_.for_torch) failure_ = as_torchs(failure_, late);
  }
  return is_over_ = true;
}

void Work::end() {
  // Freeing a tensor may wait for Python's interpreter lock, so it must not happen under lock().
  buffers_.reset();
  last_step_ = nullptr;
  finish(failure_);
  if (!options_.for_torch) return;
  c10::intrusive_ptr<Work> self;
  {
    const std::lock_guard held(mutex_);
    self.swap(self_);
  }
  if (failure_)
    future_->setError(failure_);
  else
    future_->markCompleted(c10::IValue(results_));
}

void Work::fail(std::exception_ptr failure) {
  {
    const auto held = lock();
    if (is_over_) return;
    is_over_ = true;
    failure_ = options_.for_torch ? as_torchs(failure, false) : failure;
  }
  end();
}

bool Work::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  {
    // Not lock(): another thread that advances operations may need the interpreter's lock, which this one may hold.
    const auto held = options_.for_torch ? std::unique_lock(comm::operation_mutex(), std::try_to_lock)
                                         : std::unique_lock<std::mutex>();
    if ((options_.for_torch && !held) || !advance()) return false;
  }
  end();
  return true;
}

comm::Request* Work::pending_part() {
  const auto held = lock();
  const auto part = std::ranges::find_if(parts_, &comm::Request::pending);
  return is_over_ || part == parts_.end() ? nullptr : &*part;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const auto longest = timeout > kNoTimeout ? std::optional(timeout) : options_.timeout;
  while (!isCompleted()) try {
      if (auto* const part = pending_part())
        part->wait_until([this] { return isCompleted(); }, waiting(), longest);
      else
        std::this_thread::yield();  // another thread is ending this operation
    } catch (const RemoteError&) {
      fail(std::current_exception());
    } catch (const Error& error) {
      if (!options_.for_torch) throw;
      std::rethrow_exception(as_torchs(std::current_exception(), error.code() == ExitCode::retry));
    }
  if (const auto failure = exception()) std::rethrow_exception(failure);
  return true;
}

void Work::abort() {
  if (c10d::Work::isCompleted()) return;
  fail(std::make_exception_ptr(Error(ExitCode::user_error, waiting(), "it was aborted")));
}

int Work::sourceRank() const { return parts_.empty() ? -1 : parts_.front().source(); }

bool Work::start_in_background() {
  {
    const std::lock_guard held(mutex_);
    if (std::exchange(is_in_background_, true)) return true;
  }
  const auto advance = [weak = c10::weak_intrusive_ptr<Work>(c10::intrusive_ptr<Work>::reclaim_copy(this))] {
    auto work = weak.lock();
    if (!work) return comm::Advanced{.is_over = true};
    const bool is_over = work->is_over_, ends = work->advance();
    // The thread may hold the last reference by now, so `then` drops it, without the lock.
    return comm::Advanced{.is_over = is_over || ends, .then = [work = std::move(work), ends] {
                            if (ends) work->end();
                          }};
  };
  if (comm::advance_in_background(advance)) return true;
  const std::lock_guard held(mutex_);
  return is_in_background_ = false;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  if (!options_.for_torch) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    try {
      wait();
      future->markCompleted(c10::IValue(results_));
    } catch (...) {
      future->setError(std::current_exception());
    }
    return future;
  }
  if (!isCompleted()) {
    {
      const std::lock_guard held(mutex_);
      if (!completed_) self_ = c10::intrusive_ptr<Work>::reclaim_copy(this);
    }
    if (!start_in_background()) try {
        wait();
      } catch (...) {
        fail(std::current_exception());
      }
  }
  return future_;
}

}  // namespace muster::detail::group
