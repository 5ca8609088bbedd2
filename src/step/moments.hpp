// The moments of a step at which more has to happen than counting.
#pragma once

namespace muster::detail::step {

struct OpenPass;

/// Called on the thread that runs the training function.
class Moments {
 public:
  virtual ~Moments() = default;
  /// From now on it is that micro-batch of the rank's that counts; −1: none does, or no batch that is weighed.
  virtual void micro_batch_changed(int micro_batch) = 0;
  /// `pass` has handed out a batch, and it is counted.
  virtual void batch_begun(const OpenPass& pass) = 0;
  /// A batch is done with and the next one is asked for; no step is half done, and no other pass is open. May throw.
  virtual void between_batches() = 0;
};

}  // namespace muster::detail::step
