// The interface by which a session tells its optimizers what to do about gradients with NaN or infinite numbers.
#pragma once

#include <string>

namespace muster::detail::optim {

/// Shared by all optimizers of a session, which are numbered in the order in which they are prepared. The answers are
/// the same on all ranks.
class BadNumberPolicy {
 public:
  virtual ~BadNumberPolicy() = default;
  /// True if note_bad_gradient() always throws; then parameters may be written before it is called.
  virtual bool always_throws() const noexcept = 0;
  /// Called before a step. Returns false if the step must be skipped whatever its gradients are.
  virtual bool begin_step(int optimizer) = 0;
  /// True if any rank passes true; for gradients that are not averaged. Collective.
  virtual bool any_rank(bool bad) const = 0;
  /// Called if an averaged gradient is bad. `where`: its parameter's name. `own`: the parameter of which this rank's
  /// own gradient was bad; empty if it knows of none. Throws, or the step is skipped. `together`: true if all ranks
  /// call this; then it is collective.
  virtual void note_bad_gradient(int optimizer, const std::string& where, const std::string& own, bool together) = 0;
  /// Called if the gradients are good and the step is taken.
  virtual void note_good_step(int optimizer) = 0;
};

}  // namespace muster::detail::optim
