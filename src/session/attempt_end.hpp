// An attempt that muster itself ends: by a stop on request, for bad numbers, or because a callback wants it.
#pragma once

#include <exception>

namespace muster::detail::session {

/// Keeps the exception that ends the attempt, since the training function may catch it.
class AttemptEnd {
 public:
  /// Throws `error` to end the attempt; if the attempt has ended before, throws the exception that ended it.
  template <class Exception>
  [[noreturn]] void end_with(const Exception& error) {
    if (!error_) error_ = std::make_exception_ptr(error);
    std::rethrow_exception(error_);
  }
  /// Like end_with(), with the exception that is being handled as the `error`.
  [[noreturn]] void end_with_current() {
    if (!error_) error_ = std::current_exception();
    std::rethrow_exception(error_);
  }
  /// If the attempt has ended, throws the exception that ended it.
  void throw_if_ended() const {
    if (error_) std::rethrow_exception(error_);
  }
  /// True if the attempt has ended and `thrown` is another exception.
  bool is_hidden_by(const std::exception_ptr& thrown) const noexcept { return error_ && error_ != thrown; }
  /// Call it when the training function is over. After that, throw_if_ended() throws nothing, so that the session can
  /// still save, report and wait.
  void forget() noexcept { error_ = nullptr; }

 private:
  std::exception_ptr error_ = {};
};

}  // namespace muster::detail::session
