#include "data/passes.hpp"

#include "muster/error.hpp"

#include <algorithm>

namespace muster::detail::data {

void Passes::add(const std::shared_ptr<Track>& track) {
  const auto& name = track->name;
  if (const auto other = tracks_.find(name); other != tracks_.end() && other->second->loader != track->loader)
    throw Error(ExitCode::usage, "taking the data \"" + name + "\"", "a dataset and a data loader have that name",
                "Give the loader another one: DataLoaderOptions{.name = …}");
  track->owner = weak_from_this();
  track->begin_epoch(epoch_);
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
  if (epoch != epoch_)
    for (auto& [name, saved] : unclaimed_) saved.complete = true;
  epoch_ = epoch;
}

void Passes::begin_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  for (auto& [name, track] : tracks_) track->begin_epoch(epoch);
}

void Passes::set_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  for (auto& [name, track] : tracks_)
    if (!track->epoch_set) track->begin_epoch(epoch);
  if (const auto heard = watch.lock()) heard->on_epoch(epoch);
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

const Track* Passes::without_position() const {
  const auto hand = std::find_if(hands_.begin(), hands_.end(), [](const Hand& h) { return !h.track->resumable; });
  return hand == hands_.end() ? nullptr : hand->track;
}

bool Passes::complete_steps() const {
  return std::all_of(hands_.begin(), hands_.end(), [](const Hand& h) { return !h.step || h.step->completes_step(); });
}

std::vector<Passes::Place> Passes::begin(const Track& track, const Pass& pass) {
  std::erase_if(hands_, [&](const Hand& hand) { return hand.track == &track; });
  std::vector<Place> others;
  for (const auto& hand : hands_) others.emplace_back(hand.pass, hand.batches);
  hand_of(track, pass);
  refresh();
  return others;
}

/// Also of one whose dataset has begun another pass since: it gives batches again.
Passes::Hand& Passes::hand_of(const Track& track, const Pass& pass) {
  const auto hand = std::find_if(hands_.begin(), hands_.end(), [&](const Hand& h) { return h.pass == pass.number; });
  if (hand != hands_.end()) return *hand;
  return hands_.emplace_back(
      Hand{.track = &track, .name = track.name, .pass = pass.number, .plan = pass.plan, .position = pass.position});
}

void Passes::take(const Track& track, const Pass& pass, const std::shared_ptr<const step::StepWeight>& step,
                  std::int64_t samples) {
  auto& hand = hand_of(track, pass);
  if (step->shard == 0) hand.position += step->global;
  ++hand.batches;
  hand.taken = ++takes_;
  hand.step = step;
  refresh();
  if (const auto heard = watch.lock()) heard->on_batch(track, *step, samples);
}

void Passes::leave() {
  if (hands_.size() > 1 || !complete_steps()) return;
  if (const auto heard = watch.lock()) heard->on_next();
}

void Passes::end(std::int64_t pass) {
  if (std::erase_if(hands_, [&](const Hand& hand) { return hand.pass == pass; }) > 0) refresh();
}

bool Passes::is_at(const Place& place) const {
  return std::any_of(hands_.begin(), hands_.end(),
                     [&](const Hand& hand) { return hand.pass == place.first && hand.batches == place.second; });
}

bool Passes::others_in_hand(std::int64_t pass) const {
  return std::any_of(hands_.begin(), hands_.end(), [&](const Hand& hand) { return hand.pass != pass; });
}

std::int64_t Passes::enter(std::shared_ptr<const step::StepWeight> step) {
  scopes_.emplace_back(next_number(), std::move(step));
  const auto scope = scopes_.back().first;
  refresh();
  return scope;
}

void Passes::leave(std::int64_t scope) {
  std::erase_if(scopes_, [&](const auto& known) { return known.first == scope; });
  refresh();
}

std::string Passes::conflict(const Hand& a, const Hand& b) {
  const auto shown = [](const Hand& hand, bool plan) {
    std::string text = "\"" + hand.name + "\"";
    if (!plan) return text;
    if (hand.plan.global_batch == 0) return text + " (dealt by a sampler of its own)";
    return text + " (" + std::to_string(hand.plan.samples) + " samples, " + std::to_string(hand.plan.global_batch) +
           " a step" + (hand.plan.drop_last ? ", the last dropped)" : ")");
  };
  if (a.plan.global_batch == 0 && b.plan.global_batch == 0) return {};  // every rank counts the same in both
  const bool plans = a.plan != b.plan;
  if (!plans && a.position == b.position && a.step->shard == b.step->shard) return {};
  return "batches of " + shown(a, plans) + " and of " + shown(b, plans) +
         " are in hand, and they need not weigh the same: " +
         (plans ? "their steps are not alike" : "they stand at different places of their passes");
}

void Passes::refresh() {
  *weight = {};
  if (!scopes_.empty()) {
    if (scopes_.back().second) *weight = *scopes_.back().second;
  } else {
    const Hand* last = nullptr;
    for (const auto& hand : hands_)
      if (hand.step && (last == nullptr || hand.taken > last->taken)) last = &hand;
    if (last != nullptr) *weight = *last->step;
    for (const auto& hand : hands_)
      if (hand.step && &hand != last && weight->conflict.empty()) weight->conflict = conflict(hand, *last);
  }
  if (const auto heard = watch.lock()) heard->on_shard(weight->global > 0 ? weight->shard : -1);
}

}  // namespace muster::detail::data
