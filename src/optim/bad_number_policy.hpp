// The interface by which a session tells its optimizers what to do about gradients with NaN or infinite numbers.
#pragma once

#include <string>

namespace muster::detail::optim {

/// All optimizers of a session share one policy. They are numbered in the order in which they are prepared. All
/// functions return the same on all ranks.
class BadNumberPolicy {
 public:
  virtual ~BadNumberPolicy() = default;
  /// True if note_bad_gradient() always throws; then a step may write parameters before it calls that function.
  virtual bool always_throws() const noexcept = 0;
  /// Called before a step. Returns false if the step must be skipped, even if its gradients are good.
  virtual bool begin_step(int optimizer) = 0;
  /// Returns true if `bad` is true on any rank. For gradients that are not averaged, where the ranks may differ.
  /// Collective.
  virtual bool any_rank(bool bad) const = 0;
  /// Called if an averaged gradient is bad. Throws, or returns, and then the step is skipped. `where`: the name of the
  /// gradient's parameter. `own`: the name of the parameter whose gradient was bad on this rank before the averaging;
  /// empty if none was seen. `together`: true if all ranks call this; then it is collective.
  virtual void note_bad_gradient(int optimizer, const std::string& where, const std::string& own, bool together) = 0;
  /// Called if the gradients are good, so that the step is taken.
  virtual void note_good_step(int optimizer) = 0;
};

}  // namespace muster::detail::optim
