// Notices that values of a State change behind the report that has saved them, where a resumed run would lose the
// change.
#pragma once

#include "muster/json.hpp"
#include "muster/state.hpp"

#include <map>
#include <memory>
#include <string>

namespace muster::detail::session {

/// Notices values of a State that change after the report that saved them. Compares until the next batch begins, since
/// much changes by itself after that. What a program changes between the begin of an epoch and its first batch, a
/// resumed run changes again.
class SavedValues {
 public:
  /// Call when a report has saved the State. It is compared for as long as it lives.
  void note(const std::shared_ptr<const StateEntries>& entries);
  /// Compares once: warns if a value has changed since note(). `warns`: false on all workers but one.
  void compare(bool warns);
  void forget() noexcept { entries_.reset(); }

 private:
  std::weak_ptr<const StateEntries> entries_;
  std::map<std::string, Json> values_;  ///< by the entry's name
};

}  // namespace muster::detail::session
