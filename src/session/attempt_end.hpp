// The end of an attempt by muster's own decision: a stop on request, bad numbers, a callback's wish.
#pragma once

#include <exception>

namespace muster::detail::session {

/// Keeps the exception that ends the attempt, since the training function may catch it on its way.
class AttemptEnd {
 public:
  /// Ends the attempt with `error`, or with the one that has ended it already.
  template <class Exception>
  [[noreturn]] void end_with(const Exception& error) {
    if (!error_) error_ = std::make_exception_ptr(error);
    std::rethrow_exception(error_);
  }
  /// The same with the exception that is being handled.
  [[noreturn]] void end_with_current() {
    if (!error_) error_ = std::current_exception();
    std::rethrow_exception(error_);
  }
  /// Throws what has ended the attempt; does nothing while it goes on.
  void throw_if_ended() const {
    if (error_) std::rethrow_exception(error_);
  }
  /// True if the attempt has ended and `thrown` is another exception.
  bool is_hidden_by(const std::exception_ptr& thrown) const noexcept { return error_ && error_ != thrown; }
  /// The training function is over, so that what follows may call the session again.
  void forget() noexcept { error_ = nullptr; }

 private:
  std::exception_ptr error_ = {};
};

}  // namespace muster::detail::session
