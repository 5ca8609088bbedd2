#include "train/attempt.hpp"

#include "comm/agreement.hpp"

namespace muster::detail::train {
namespace {

using comm::Outcome;

std::optional<Error> conclude(const Communicator& world, const Patience& patience, const Outcome& mine) {
  try {
    const auto outcomes = comm::agree(world, mine, mine.kind == Outcome::Kind::done ? patience.done : patience.failed);
    return comm::root_cause(outcomes, world.topology().hosts);
  } catch (const comm::Lost& lost) {
    if (mine.kind == Outcome::Kind::done) throw;
    throw comm::Lost(Error(mine.code, mine.text + " (then: " + lost.what() + ")"), lost.ranks());
  }
}

}  // namespace

std::optional<Error> attempt(const Communicator& world, const Patience& patience, const std::function<void()>& work) {
  // Nobody is still in a collective outside of the attempt, where an alarm from inside would be heard.
  comm::agree(world, {}, patience.done);
  Outcome mine;
  try {
    work();
  } catch (const comm::Lost&) {
    throw;
  } catch (...) {
    mine = comm::caught(world);
    comm::raise_alarm(world, mine);
  }
  return conclude(world, patience, mine);
}

void check_together(const Communicator& world, const Patience& patience, const std::function<void()>& work) {
  Outcome mine;
  try {
    work();
  } catch (...) {
    mine = comm::caught();
  }
  if (const auto error = conclude(world, patience, mine)) throw *error;
}

}  // namespace muster::detail::train
