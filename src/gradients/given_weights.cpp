#include "gradients/given_weights.hpp"

#include "base/log.hpp"
#include "gradients/exchange.hpp"
#include "muster/error.hpp"

#include <cmath>
#include <utility>

namespace muster::detail::gradients {

void GivenWeights::begin(const step::BatchWeight& batch, bool goes_on, bool left) {
  if (left || (goes_on && given != batch.given.has_value()))
    throw Error(ExitCode::usage, averaging,
                "gradients of batches with and without a weight are added up before they are averaged",
                "Give step() a weight for every batch of a step or for none, and call zero_grad() after the step");
  given = batch.given.has_value();
  if (!goes_on) sum = 0;
  if (!batch.given) return;
  // Until the first mean of weights is known, assume that the weights are numbers of samples.
  if (unit == 0) unit = batch.global > 0 ? std::exp2(-std::ilogb(static_cast<double>(batch.global) / batch.total)) : 1;
  sum += *batch.given * unit;
}

bool GivenWeights::end(double mean, bool is_joined) {
  relative = mean > 0 ? sum / mean : 0;
  sum = 0;
  if (mean > 0) {
    // Inside join(), ranks without batches take no part here and would keep another unit.
    if (!is_joined) unit *= std::exp2(-std::ilogb(mean));
    return true;
  }
  if (!std::exchange(warned, true))
    log::warn(
        "step() was given the weight 0 on all ranks, so no gradients are averaged and no optimizer steps with "
        "them. A loss is a mean over nothing; this is said once");
  return false;
}

void GivenWeights::require_alike(Flags flags) {
  if (has_both(flags, gradients_weighted, gradients_unweighted))
    throw Error(ExitCode::usage, averaging, "step() was given a weight for some batches of a step only",
                "Give it a weight for every batch and on every rank, 0 where nothing counts");
}

}  // namespace muster::detail::gradients
