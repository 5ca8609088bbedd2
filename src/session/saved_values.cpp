#include "session/saved_values.hpp"

#include "base/log.hpp"
#include "state/stateful.hpp"

#include <utility>

namespace muster::detail::session {

void SavedValues::note(const std::shared_ptr<const StateEntries>& entries) {
  entries_ = entries;
  values_.clear();
  for (const auto& [name, entry] : *entries)
    if (auto values = entry.object()->quick_values(); !values.is_null()) values_.emplace(name, std::move(values));
}

void SavedValues::compare(bool warns) {
  const auto entries = std::exchange(entries_, {}).lock();
  if (!entries || !warns) return;
  std::string changed;
  for (const auto& [name, entry] : *entries)
    if (const auto saved = values_.find(name);
        saved != values_.end() && saved->second != entry.object()->quick_values())
      changed += (changed.empty() ? "" : ", ") + name;
  if (!changed.empty())
    log::warn(
        "the State has changed since it was reported, and a run that resumes from that report loses the change: " +
        changed + ". Report last, after the schedulers' steps and other changes of what the State holds");
}

}  // namespace muster::detail::session
