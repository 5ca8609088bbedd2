#include "data/passes.hpp"

#include "muster/error.hpp"

namespace muster::detail::data {

void Passes::add(const std::shared_ptr<Track>& track) {
  const auto& name = track->name;
  if (const auto other = tracks_.find(name); other != tracks_.end() && other->second->loader != track->loader)
    throw Error(ExitCode::usage, "taking the data \"" + name + "\"", "a dataset and a data loader have that name",
                "Give the loader another one: DataLoaderOptions{.name = …}");
  track->owner = weak_from_this();
  track->steps = steps;
  track->begin_epoch(steps->epoch);
  tracks_[name] = track;
  if (const auto saved = unclaimed_.find(name); saved != unclaimed_.end()) {
    const auto [position, complete] = saved->second;
    unclaimed_.erase(saved);
    complete ? track->remember(position) : track->restore(position);
  }
}

std::shared_ptr<Track> Passes::find_loader(const std::string& name) const {
  const auto found = tracks_.find(name);
  return found != tracks_.end() && found->second->loader ? found->second : nullptr;
}

void Passes::enter_epoch(std::int64_t epoch) {
  if (epoch != steps->epoch)
    for (auto& [name, saved] : unclaimed_) saved.complete = true;
  steps->epoch = epoch;
}

void Passes::begin_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  for (auto& [name, track] : tracks_) track->begin_epoch(epoch);
}

void Passes::set_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  steps->epoch_set = true;
  for (auto& [name, track] : tracks_)
    if (!track->epoch_set) track->begin_epoch(epoch);
}

Json Passes::positions() const {
  Json all = Json::object();
  for (const auto& [name, saved] : unclaimed_)
    if (!saved.complete) all[name] = saved.position;
  for (const auto& [name, track] : tracks_)
    if (track->split) all[name] = track->position();
  return all;
}

void Passes::restore(const std::string& name, const Json& position, bool complete) {
  const auto track = tracks_.find(name);
  if (track == tracks_.end())
    unclaimed_[name] = {position, complete};
  else
    complete ? track->second->remember(position) : track->second->restore(position);
}

bool Passes::epoch_complete() const {
  bool data = false, passed = false, unfinished = false;
  for (const auto& [name, track] : tracks_) {
    if (!track->split || track->only_watched()) continue;
    data = true;
    passed = passed || track->passes > 0;
    unfinished = unfinished || track->unfinished();
  }
  for (const auto& [name, saved] : unclaimed_) {
    if (saved.complete || !saved.position.is_object()) continue;
    data = true;
    passed = passed || saved.position.value("passes", 0) > 0;
    unfinished = unfinished || saved.position.value("consumed", 0) > 0;
  }
  return !unfinished && (passed || !data);
}

}  // namespace muster::detail::data
