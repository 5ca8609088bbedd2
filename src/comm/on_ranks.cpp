#include "comm/on_ranks.hpp"

#include "comm/agreement.hpp"

namespace muster::detail::comm {
namespace {

/// The outcome, packed, with the result as its text.
std::string attempt(const std::function<std::string()>& work) {
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

}  // namespace

std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work) {
  std::vector<Outcome> outcomes;
  for (const auto& packed : communicator.all_gather(attempt(work))) outcomes.push_back(unpack(packed));
  if (const auto error = root_cause(outcomes, communicator.topology().hosts)) throw *error;
  std::vector<std::string> results;
  for (auto& outcome : outcomes) results.push_back(std::move(outcome.text));
  return results;
}

std::string on_root(const Communicator& communicator, const std::function<std::string()>& work) {
  auto outcome = unpack(communicator.broadcast(communicator.rank() == 0 ? attempt(work) : ""));
  if (outcome.kind == Outcome::Kind::failed) throw Error(outcome.code, outcome.text);
  return std::move(outcome.text);
}

}  // namespace muster::detail::comm
