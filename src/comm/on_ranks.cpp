#include "comm/on_ranks.hpp"

#include "comm/agreement.hpp"

namespace muster::detail::comm {
namespace {

/// The outcome, packed, with the result as its text.
std::string packed_outcome(const std::function<std::string()>& work) {
  Outcome mine;
  try {
    mine.text = work();
  } catch (const RemoteError&) {
    throw;  // an alarm: nobody waits for this rank's word
  } catch (...) {
    mine = caught();
    mine.agreed = false;
  }
  return pack(mine);
}

std::optional<Error> conclude(const Communicator& world, const WaitLimits& limits, const Outcome& mine,
                              std::map<int, std::string>* errors = nullptr) {
  const bool done = mine.kind == Outcome::Kind::done;
  try {
    const auto outcomes = agree(world, mine, done ? limits.done : limits.failed);
    for (std::size_t rank = 0; errors != nullptr && rank < outcomes.size(); ++rank)
      if (outcomes[rank].kind != Outcome::Kind::done) errors->emplace(static_cast<int>(rank), outcomes[rank].text);
    return root_cause(outcomes, world.topology().hosts);
  } catch (const Lost& lost) {
    if (done) throw;
    // Who has waited too long has said all of it.
    throw Lost(Error(mine.code, mine.stalled ? mine.text : mine.text + " (then: " + lost.what() + ")"), lost.turn());
  }
}

}  // namespace

std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work) {
  std::vector<Outcome> outcomes;
  for (const auto& packed : communicator.all_gather(packed_outcome(work))) outcomes.push_back(unpack(packed));
  if (const auto error = root_cause(outcomes, communicator.topology().hosts)) throw *error;
  std::vector<std::string> results;
  for (auto& outcome : outcomes) results.push_back(std::move(outcome.text));
  return results;
}

std::string on_root(const Communicator& communicator, const std::function<std::string()>& work) {
  auto outcome = unpack(communicator.broadcast(communicator.rank() == 0 ? packed_outcome(work) : ""));
  if (outcome.kind == Outcome::Kind::failed) throw Error(outcome.code, outcome.text);
  return std::move(outcome.text);
}

std::optional<Error> attempt_on_all(const Communicator& world, const WaitLimits& limits,
                                    const std::function<void()>& work, std::map<int, std::string>* errors) {
  const Nested nested(world);
  // No rank is still in an earlier collective, where an alarm from this work would reach it.
  agree(world, {}, limits.done);
  Outcome mine;
  try {
    work();
  } catch (const Lost&) {
    throw;
  } catch (...) {
    mine = caught(world);
    raise_alarm(world, mine);
  }
  return conclude(world, limits, mine, errors);
}

void check_on_all(const Communicator& world, const WaitLimits& limits, const std::function<void()>& work) {
  const Nested nested(world);
  Outcome mine;
  try {
    work();
  } catch (...) {
    mine = caught();
  }
  if (const auto error = conclude(world, limits, mine)) throw *error;
}

}  // namespace muster::detail::comm
