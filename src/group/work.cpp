#include "group/work.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace muster::detail::group {

Work::Work(int rank, c10d::OpType type, const char* title, std::optional<std::chrono::milliseconds> timeout)
    : c10d::Work(rank, type, title),
      title_(title),
      timeout_(timeout),
      buffers_(std::make_shared<std::deque<Buffer>>()) {}

std::string Work::error_prefix() const { return std::string("starting ") + title_; }

Buffer& Work::keep_buffer(const at::Tensor& tensor, Access access) {
  auto& buffer = buffers_->emplace_back(tensor, access, error_prefix());
  if (access != Access::read) results_.push_back(tensor);
  return buffer;
}

void Work::start() {
  for (const auto& start : std::exchange(planned_, {})) parts_.emplace_back(start()).keep(buffers_);
}

bool Work::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  std::exception_ptr failure;
  try {
    if (!std::all_of(parts_.begin(), parts_.end(), [](comm::Request& part) { return part.done(); })) return false;
    for (auto& buffer : *buffers_) buffer.finish();
    buffers_.reset();
  } catch (...) {
    failure = std::current_exception();
  }
  finish(failure);
  return true;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  while (!isCompleted()) try {
      const auto own = timeout > kNoTimeout ? std::optional(timeout) : timeout_;
      std::ranges::find_if(parts_, &comm::Request::pending)
          ->wait_until([this] { return isCompleted(); }, std::string("waiting for ") + title_, own);
    } catch (const RemoteError&) {
      finish(std::current_exception());
    }
  if (const auto failure = exception()) std::rethrow_exception(failure);
  return true;
}

void Work::abort() {
  if (c10d::Work::isCompleted()) return;
  finish(std::make_exception_ptr(Error(ExitCode::user_error, std::string("waiting for ") + title_, "it was aborted")));
}

int Work::sourceRank() const { return parts_.empty() ? -1 : parts_.front().source(); }

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  try {
    wait();
    future->markCompleted(c10::IValue(results_));
  } catch (...) {
    future->setError(std::current_exception());
  }
  return future;
}

}  // namespace muster::detail::group
