// Checks that all workers make their training passes with the same options.
#pragma once

#include "muster/communicator.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::session {

/// Compares the options that decide which samples the workers take. The workers do not wait for each other when a pass
/// begins, so they compare the next time they communicate: when they ask each other whether to stop, or at a report.
/// (If they average gradients, the averages carry the requests to stop, and the comparison comes only at the report.)
class SamePasses {
 public:
  /// Call it when a pass, not inside of another pass, has handed out its first batch.
  void note(const step::OpenPass& pass);
  /// Compares if a pass was noted since the last comparison. Call it at a boundary inside a pass where all workers have
  /// just communicated, so that all have called note() for this pass. Throws as require_same_passes() does. Collective.
  void compare(const Communicator& control);
  /// The options of the passes that were noted since the last call of forget(): {pass name: {option: value}}. If two
  /// passes have the same name, the last counts.
  const Json& noted() const noexcept { return noted_; }
  /// Call it when the options in noted() have been compared.
  void forget() { noted_ = Json::object(); }
  /// Warns once if the workers have taken different numbers of training steps. `steps`: of each rank. The numbers
  /// differ if a pass trains on some ranks only, or if ranks leave their loops early.
  void warn_of_different_steps(const std::vector<std::int64_t>& steps, bool is_first);

 private:
  Json noted_ = Json::object();
  bool is_due_ = false;  ///< true if a pass was noted since the last compare(); a report does not reset this
  bool has_warned_of_steps_ = false;
};

/// Throws an Error (ExitCode::usage), the same on all ranks, that names the first option in which two ranks differ.
/// `of_ranks`: noted() of each rank. A pass that only some ranks have made is compared among these.
void require_same_passes(const std::vector<Json>& of_ranks);

}  // namespace muster::detail::session
