// Checks that the workers make their training passes with the same options.
#pragma once

#include "muster/communicator.hpp"
#include "muster/json.hpp"
#include "step/steps.hpp"

#include <cstdint>
#include <vector>

namespace muster::detail::session {

/// Compares the options that decide which samples the workers take. Passes do not wait for each other when they begin,
/// so the workers compare where they meet next: when they ask each other whether to stop, or at a report. If gradients
/// are averaged, they carry the requests to stop, so it is the report.
class SamePasses {
 public:
  /// A pass that is not inside of another one has handed out its first batch.
  void note(const step::OpenPass& pass);
  /// Call at a boundary inside a pass where the workers have just met. Compares once after note(), which all workers
  /// have called for that pass. Throws as require_same_passes(). Collective.
  void compare(const Communicator& control);
  /// The options of the passes since forget(): {pass name: {option: value}}, of each name the last pass.
  const Json& noted() const noexcept { return noted_; }
  /// Call once they have been compared.
  void forget() { noted_ = Json::object(); }
  /// Warns once if the workers have taken different numbers of training steps. `steps`: of each rank. They differ if a
  /// pass trains on some ranks only, and if ranks leave their loops early.
  void warn_of_different_steps(const std::vector<std::int64_t>& steps, bool is_first);

 private:
  Json noted_ = Json::object();
  bool is_due_ = false;  ///< a pass was noted since the last comparison; a report does not change that
  bool has_warned_of_steps_ = false;
};

/// Throws an Error (ExitCode::usage), the same on all ranks, that names the first option in which two ranks differ.
/// `of_ranks`: noted() of each rank. A pass that only some ranks have made is compared among them.
void require_same_passes(const std::vector<Json>& of_ranks);

}  // namespace muster::detail::session
