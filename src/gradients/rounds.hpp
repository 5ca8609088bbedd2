// The rounds of one model on this rank: the phase of the present one, and those that exceptions have ended.
#pragma once

#include "gradients/exchange.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace muster::detail::gradients {

/// The phase of this rank's exchanges. A round here is an averaging round. Each line: an event -> the next phase.
///
///   idle           a gradient of a new round  -> collecting; postponed if abandoned rounds must end first, or
///                                                new exchanges made for unfrozen parameters
///                  a gradient in no_sync()    -> idle: .grad only accumulates, until average_accumulated()
///                  a fused optimizer's step   -> idle: the step averages the contents of .grad
///                  fetch_averages()           -> idle: averages .grad if it holds this rank's own gradients
///   collecting     more gradients             -> collecting: the exchanges get them as they are made
///                  the end of backward()      -> idle: .grad holds the averages; with virtual workers, it is empty
///                                                before the step's last micro-batch
///                                             -> awaiting_step, if an optimizer is fused and the program gives no
///                                                weights: .grad holds this rank's own gradients, also after the
///                                                step, until fetch_averages()
///                                                Over several nodes, the exchange gets them nevertheless
///                                                (ModelExchanges::begin_early)
///   postponed      more gradients             -> postponed: .grad only accumulates
///                  the end of backward()      -> collecting, once abandoned rounds are finished; all gradients are
///                                                given at once
///   awaiting_step  the step                   -> idle
///                  fetch_averages()           -> idle: .grad holds the averages, and the step may average them again
///                  a gradient of a new round  -> collecting or postponed: the step averages the sum
///                  a gradient in no_sync()    -> awaiting_step
///
/// The fusion ends when set_fused() removes the fused optimizer, as when it is destroyed, or when a round trains a
/// parameter for the first time. In the first case, the next round averages in backward(); in the second case, that
/// same round does. If .grad still holds this rank's own gradients when it begins, these gradients count as pending.
///
/// An exception, at whatever line of backward(), leaves the phase at collecting or postponed. The next event (a
/// gradient, a step, the end of join() or finish_abandoned_rounds()) abandons that round: -> idle. The other ranks
/// finish the round without this rank's gradients, and so learn of the exception. This rank finishes it the next time
/// it waits for the others anyway. If finishing throws, or an exchange does, the phase is already the phase that
/// follows the round.
///
/// With a fused optimizer, ranks agree on each event before they wait for each other in it (namespace event).
///
/// If one backward() runs through several models, each model's reducer has its own phase. All reducers give their
/// gradients before the first one finishes, and they finish in the order of prepare_model(), since ranks may begin
/// them in different orders. autograd::grad() does not add to .grad, so it is no round. A frozen parameter
/// contributes the contents of its .grad.
enum class Phase { idle, collecting, postponed, awaiting_step };

/// What a rank is about to do, as flags: ranks that are fused with an optimizer would otherwise wait in different
/// places for each other.
namespace event {
constexpr Flags averages_fetched = 32;  ///< averages gradients that were left to an optimizer without its step
constexpr Flags averages_stepped = 64;  ///< steps the optimizer with them
constexpr Flags backward_ended = 128;
constexpr Flags backward_abandoned = 256;  ///< as backward_ended, but an exception has ended it
constexpr Flags any = averages_fetched | averages_stepped | backward_ended;
/// The rank has begun so many averaging rounds since the last step, which are counted modulo 4.
constexpr Flags after_rounds(unsigned rounds) { return Flags{512} << rounds % 4; }
constexpr Flags after_any = 15 * 512;
}  // namespace event

struct Rounds {
  /// A round that an exception has ended and in which other ranks may wait.
  struct Abandoned {
    std::vector<std::size_t> unfrozen;
    bool fused;  ///< see Rounds::fused
    bool begun;  ///< true if the exchanges have begun it; only possible for the first of several
  };

  // See ParallelContext.
  const std::shared_ptr<const int> no_sync_depth;
  const std::function<bool()> stop_requested;

  Phase phase = Phase::idle;
  std::vector<Abandoned> abandoned = {};
  std::vector<std::size_t> unfrozen = {};  ///< parameters that this round trains for the first time
  bool fused = false;                      ///< true if there is a fused optimizer in this averaging round
  bool last_was_no_sync = false;           ///< true if the last round was in no_sync(); the same on all ranks
  std::int64_t averaged = 0;               ///< see Reducer::averaged_round_count()
  std::int64_t begun = 0;                  ///< see Reducer::begun_round_count()
  bool any_stop_requested = false;

  /// True until the round has ended or was abandoned.
  bool is_open() const noexcept { return phase == Phase::collecting || phase == Phase::postponed; }
  /// If an exception has ended the last round, notes that; returns true if the exchanges then miss gradients of it.
  bool abandon() {
    if (!is_open()) return false;
    const bool is_begun = std::exchange(phase, Phase::idle) == Phase::collecting;
    abandoned.push_back({std::move(unfrozen), fused, is_begun});
    return is_begun;
  }
  /// Returns the flags that this rank sends in every averaging round.
  Flags flags() const { return stop_requested && stop_requested() ? gradients::stop_requested : 0; }
  /// Counts a round that has averaged, with these flags of all ranks.
  void count_averaged(Flags flags) noexcept {
    ++averaged;
    any_stop_requested = (flags & gradients::stop_requested) != 0;
  }
};

}  // namespace muster::detail::gradients
