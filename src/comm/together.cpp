#include "comm/together.hpp"

#include "comm/agreement.hpp"

namespace muster::detail::comm {
namespace {

/// Whether it worked in one byte, the error's code in another, then the result or the error's text.
std::string attempt(const std::function<std::string()>& work) {
  try {
    return std::string(2, '\0') + work();
  } catch (const RemoteError&) {
    throw;  // an alarm: nobody waits for this rank's word
  } catch (...) {
    const auto outcome = caught();
    return std::string{'\1', static_cast<char>(outcome.code)} + outcome.text;
  }
}

Outcome outcome_of(const std::string& packed) {
  if (packed.at(0) == '\0') return {};
  return {Outcome::Kind::failed, static_cast<ExitCode>(static_cast<unsigned char>(packed.at(1))), false,
          packed.substr(2)};
}

}  // namespace

std::vector<std::string> on_all(const Communicator& communicator, const std::function<std::string()>& work) {
  auto results = communicator.all_gather(attempt(work));
  std::vector<Outcome> outcomes;
  for (const auto& result : results) outcomes.push_back(outcome_of(result));
  if (const auto error = root_cause(outcomes, communicator.topology().hosts)) throw *error;
  for (auto& result : results) result.erase(0, 2);
  return results;
}

std::string on_root(const Communicator& communicator, const std::function<std::string()>& work) {
  auto result = communicator.broadcast(communicator.rank() == 0 ? attempt(work) : "");
  if (const auto outcome = outcome_of(result); outcome.kind == Outcome::Kind::failed)
    throw Error(outcome.code, outcome.text);
  return result.substr(2);
}

}  // namespace muster::detail::comm
