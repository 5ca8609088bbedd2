// What a session wants of its optimizers about gradients with NaN or infinite numbers.
#pragma once

#include <string>

namespace muster::detail::optim {

/// One for all optimizers of a session, which are numbered as they are prepared. The answers are the same on all ranks.
class NumberWatch {
 public:
  virtual ~NumberWatch() = default;
  /// Whether bad() always throws: then parameters may have been written by the time it is called.
  virtual bool ends_training() const noexcept = 0;
  /// A step is next. False if it is to be left out whatever its gradients are.
  virtual bool begin_step(int optimizer) = 0;
  /// Whether any rank says so, for gradients that are not averaged. Collective.
  virtual bool any_rank(bool bad) const = 0;
  /// An averaged gradient is bad, `where` (a parameter's name); `own` is the parameter of which this rank's own
  /// gradient was, if it knows one. Throws, or the step is left out. `together`: all ranks are here. Collective, unless
  /// not.
  virtual void bad(int optimizer, const std::string& where, const std::string& own, bool together) = 0;
  /// The gradients are good, and the step is taken.
  virtual void good(int optimizer) = 0;
};

}  // namespace muster::detail::optim
