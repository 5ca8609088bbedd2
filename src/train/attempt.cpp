#include "train/attempt.hpp"

#include "comm/agreement.hpp"

#include <algorithm>
#include <string>

namespace muster::train {

std::optional<Error> attempt(const Communicator& world, std::chrono::milliseconds patience,
                             std::chrono::milliseconds grace, const std::function<void()>& work) {
  using comm::Outcome;
  Outcome mine;
  try {
    work();
  } catch (const comm::Lost&) {
    throw;
  } catch (...) {
    mine = comm::caught();
  }

  std::vector<Outcome> outcomes;
  try {
    outcomes = comm::agree(world, mine, mine.kind == Outcome::Kind::done ? patience : grace);
  } catch (const comm::Lost& lost) {
    if (mine.kind != Outcome::Kind::failed) throw;
    throw comm::Lost(mine.code, mine.text + " (then: " + lost.what() + ")");
  }
  const auto failed =
      std::find_if(outcomes.begin(), outcomes.end(), [](const Outcome& o) { return o.kind == Outcome::Kind::failed; });
  if (failed == outcomes.end()) return std::nullopt;
  const bool alike = std::all_of(outcomes.begin(), outcomes.end(), [&](const Outcome& o) {
    return o.kind == Outcome::Kind::done || o.text == failed->text;
  });
  if (alike && std::count_if(outcomes.begin(), outcomes.end(),
                             [](const Outcome& o) { return o.kind == Outcome::Kind::failed; }) > 1)
    return Error(failed->code, failed->text);
  const auto rank = static_cast<std::size_t>(failed - outcomes.begin());
  if (outcomes.size() == 1) return Error(failed->code, failed->text);
  return Error(failed->code,
               "rank " + std::to_string(rank) + " (" + world.topology().hosts[rank] + "): " + failed->text);
}

}  // namespace muster::train
