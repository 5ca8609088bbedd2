#include "train/on_all_ranks.hpp"

#include "comm/agreement.hpp"

namespace muster::detail::train {
namespace {

using comm::Outcome;

std::optional<Error> conclude(const Communicator& world, const WaitLimits& limits, const Outcome& mine) {
  try {
    const auto outcomes = comm::agree(world, mine, mine.kind == Outcome::Kind::done ? limits.done : limits.failed);
    return comm::root_cause(outcomes, world.topology().hosts);
  } catch (const comm::Lost& lost) {
    if (mine.kind == Outcome::Kind::done) throw;
    throw comm::Lost(Error(mine.code, mine.text + " (then: " + lost.what() + ")"), lost.ranks());
  }
}

}  // namespace

std::optional<Error> try_on_all_ranks(const Communicator& world, const WaitLimits& limits,
                                      const std::function<void()>& work) {
  // No rank is still in an earlier collective, where an alarm from this work would reach it.
  comm::agree(world, {}, limits.done);
  Outcome mine;
  try {
    work();
  } catch (const comm::Lost&) {
    throw;
  } catch (...) {
    mine = comm::caught(world);
    comm::raise_alarm(world, mine);
  }
  return conclude(world, limits, mine);
}

void check_on_all_ranks(const Communicator& world, const WaitLimits& limits, const std::function<void()>& work) {
  Outcome mine;
  try {
    work();
  } catch (...) {
    mine = comm::caught();
  }
  if (const auto error = conclude(world, limits, mine)) throw *error;
}

}  // namespace muster::detail::train
