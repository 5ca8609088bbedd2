// Notices that the program has changed values of a State after the report that saved them; a resumed run would lose the
// change.
#pragma once

#include "muster/json.hpp"
#include "muster/state.hpp"

#include <map>
#include <memory>
#include <string>

namespace muster::detail::session {

/// Notices values of a State that change after the report that saved them. It compares only until the next batch
/// begins, since training changes values after that. Changes between the begin of an epoch and its first batch do not
/// count: a resumed run makes them again.
class SavedValues {
 public:
  /// Call it when a report has saved the State. The State is only compared while it lives.
  void note(const std::shared_ptr<const StateEntries>& entries);
  /// Warns if a value has changed since note(), then forgets the State. `warns`: true on one worker only.
  void compare(bool warns);
  void forget() noexcept { entries_.reset(); }

 private:
  std::weak_ptr<const StateEntries> entries_;
  std::map<std::string, Json> values_;  ///< by name of the entry
};

}  // namespace muster::detail::session
