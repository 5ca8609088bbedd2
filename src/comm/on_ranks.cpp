#include "comm/on_ranks.hpp"

#include "base/text.hpp"
#include "comm/agreement.hpp"

namespace muster::detail::comm {
namespace {

/// Runs `work` and returns its packed outcome, whose text is the result.
std::string packed_outcome(const std::function<std::string()>& work) {
  Outcome mine;
  try {
    mine.text = work();
  } catch (const RemoteError&) {
    throw;  // an alarm: no rank waits for this one's result
  } catch (...) {
    mine = current_outcome();
    mine.agreed = false;
  }
  return pack(mine);
}

/// Agrees with all ranks on how the work has ended and returns the root cause; none if all have succeeded. `errors`
/// gets the error of each rank that has not succeeded.
std::optional<Error> conclude(const Communicator& world, const Timeouts& timeouts, const Outcome& mine,
                              std::map<int, std::string>* errors = nullptr) {
  const bool done = mine.kind == Outcome::Kind::done;
  try {
    const auto outcomes = agree(world, mine, done ? timeouts.done : timeouts.failed);
    for (std::size_t rank = 0; errors != nullptr && rank < outcomes.size(); ++rank)
      if (outcomes[rank].kind != Outcome::Kind::done) errors->emplace(static_cast<int>(rank), outcomes[rank].text);
    return root_cause(outcomes, world.topology().hosts);
  } catch (const RanksMissing& lost) {
    if (done) throw;
    // If this rank has waited too long, its error already says which ranks are missing.
    throw RanksMissing(Error(mine.code, mine.stalled ? mine.text : mine.text + " (then: " + lost.what() + ")"),
                       lost.report_delay());
  }
}

}  // namespace

std::vector<std::string> run_packed_on_all(const Communicator& communicator, const std::function<std::string()>& work) {
  std::vector<Outcome> outcomes;
  for (const auto& packed : communicator.all_gather(packed_outcome(work))) outcomes.push_back(unpack(packed));
  if (const auto error = root_cause(outcomes, communicator.topology().hosts)) throw *error;
  std::vector<std::string> results;
  for (auto& outcome : outcomes) results.push_back(std::move(outcome.text));
  return results;
}

std::string run_packed_on_root(const Communicator& communicator, const std::function<std::string()>& work) {
  auto outcome = unpack(communicator.broadcast(communicator.rank() == 0 ? packed_outcome(work) : ""));
  if (outcome.kind == Outcome::Kind::failed) throw Error(outcome.code, outcome.text);
  return std::move(outcome.text);
}

void require_same_options(const Communicator& communicator, const std::string& whose, const Json& mine) {
  const auto of_ranks = communicator.all_gather(json_text_lossy(mine));
  const auto first = json_from_text(of_ranks.front());
  for (std::size_t rank = 1; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank] == of_ranks.front()) continue;
    const auto other = json_from_text(of_ranks[rank]);
    for (const auto& [option, value] : first.items())
      if (value != other.at(option))
        throw Error(
            ExitCode::usage, "comparing the options of " + whose + " on all ranks",
            str(option, " is ", json_text(value), " on rank 0 and ", json_text(other.at(option)), " on rank ", rank),
            "Give the same options on every rank");
  }
}

std::optional<Error> attempt_on_all(const Communicator& world, const Timeouts& timeouts,
                                    const std::function<void()>& work, std::map<int, std::string>* errors) {
  const NestedAttempt nested(world);
  // After this no rank is still in an earlier collective, which an alarm from this work would end.
  agree(world, {}, timeouts.done);
  Outcome mine;
  try {
    work();
  } catch (const RanksMissing&) {
    throw;
  } catch (...) {
    mine = current_outcome(world);
    raise_alarm(world, mine);
  }
  return conclude(world, timeouts, mine, errors);
}

void check_on_all(const Communicator& world, const Timeouts& timeouts, const std::function<void()>& work) {
  const NestedAttempt nested(world);
  Outcome mine;
  try {
    work();
  } catch (...) {
    mine = current_outcome();
  }
  if (const auto error = conclude(world, timeouts, mine)) throw *error;
}

}  // namespace muster::detail::comm
