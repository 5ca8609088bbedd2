#include "data/passes/cursors.hpp"

#include "muster/error.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

void Cursors::add(const std::shared_ptr<Cursor>& cursor) {
  const auto& options = cursor->options();
  const auto& name = options.name;
  if (const auto found = cursors_.find(name); found != cursors_.end()) {
    const auto& other = found->second->options();
    const char* const remedy = "Give each a name of its own: DataLoaderOptions{.name = …}";
    if (other.loader != options.loader)
      throw Error(ExitCode::usage, "taking the data \"" + name + "\"", "a dataset and a data loader have that name",
                  remedy);
    if (options.loader && other.resumable != options.resumable)
      throw Error(ExitCode::usage, "taking the data \"" + name + "\"",
                  "two data loaders have that name, and only one of them has a sampler of its own", remedy);
  }
  cursor->owner_ = weak_from_this();
  cursor->steps_ = steps;
  cursor->begin_epoch(steps->epoch);
  const auto before = std::exchange(cursors_[name], cursor);
  // The name was registered before, and the restored position was not used there: this cursor takes it.
  if (const auto saved = restored_.find(name); before && before->is_restored() && saved != restored_.end())
    cursor->restore(saved->second.position, saved->second.complete);
  if (const auto saved = waiting_.extract(name)) restore(name, saved.mapped().position, saved.mapped().complete);
}

std::shared_ptr<Cursor> Cursors::find_loader(const std::string& name) const {
  const auto found = cursors_.find(name);
  return found != cursors_.end() && found->second->options().loader ? found->second : nullptr;
}

void Cursors::enter_epoch(std::int64_t epoch) {
  if (epoch != steps->epoch) {
    for (auto& [name, saved] : waiting_) saved.complete = true;
    steps->complete_epoch = -1;
  }
  steps->epoch = epoch;
}

void Cursors::enter_loop() {
  steps->in_loop = steps->looped = true;
  for (auto& [name, cursor] : cursors_) cursor->enter_loop();
}

void Cursors::begin_epoch(std::int64_t epoch) {
  steps->counted = true;
  resume_epoch(epoch);
}

void Cursors::resume_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  for (auto& [name, cursor] : cursors_) cursor->begin_epoch(epoch);
}

void Cursors::set_epoch(std::int64_t epoch) {
  enter_epoch(epoch);
  steps->epoch_set = steps->counted = true;
  for (auto& [name, cursor] : cursors_)
    if (!cursor->epoch_set_) cursor->begin_epoch(epoch);
}

Json Cursors::positions() const {
  Json all = Json::object();
  for (const auto& [name, saved] : waiting_)
    if (!saved.complete) all[name] = saved.position;
  for (const auto& [name, cursor] : cursors_)
    if (cursor->options().split) all[name] = cursor->position();
  return all;
}

void Cursors::restore(const std::string& name, const Json& position, bool complete) {
  const auto cursor = cursors_.find(name);
  if (cursor == cursors_.end())
    waiting_[name] = {position, complete};
  else
    cursor->second->restore(position, complete), restored_[name] = {position, complete};
}

Cursors::Passes Cursors::of_epoch() const {
  bool data = false, unfinished = false;
  bool passed = steps->looped && !steps->in_loop;  // the loop is over
  for (const auto& [name, cursor] : cursors_) {
    if (!cursor->options().split || cursor->only_evaluated()) continue;
    data = true;
    passed = passed || cursor->passes(steps->looped).epoch.passes > 0;
    unfinished = unfinished || cursor->unfinished();
  }
  for (const auto& [name, saved] : waiting_) {
    if (saved.complete || !saved.position.is_object()) continue;
    data = true;
    passed = passed || saved.position.value("passes", 0) > 0;
    unfinished = unfinished || saved.position.value("consumed", 0) > 0 || saved.position.contains("outside");
  }
  if (!data) return Passes::unknown;
  return unfinished ? Passes::under_way : passed ? Passes::over : Passes::none;
}

std::string Cursors::with_rest() const {
  for (const auto& [name, cursor] : cursors_)
    if (cursor->options().split && cursor->passes(steps->looped).has_rest()) return name;
  return {};
}

std::string Cursors::not_taken_up(bool in_loop) const {
  for (const auto& [name, cursor] : cursors_)
    if (const auto& group = cursor->passes(in_loop); group.resume_pending && group.skipped) return name;
  return {};
}

std::string Cursors::not_taken() const {
  for (const auto& [name, saved] : waiting_)
    if (!saved.complete && saved.position.is_object() &&
        (saved.position.value("finished", 0) > 0 || saved.position.value("consumed", 0) > 0))
      return name;
  return {};
}

Cursor::Section Cursors::section(std::int64_t epoch, bool in_loop) const {
  Cursor::Section section{.epoch = epoch};
  if (!in_loop) section.step = steps->call + 1, section.after_loop = steps->after_loop;
  for (const auto& [name, cursor] : cursors_) {
    const auto& group = cursor->passes(in_loop);
    if (group.epoch.number != epoch) continue;
    section.finished += group.repeated_passes() - group.epoch.to_skip;
    if (group.last.under_way) section.step = std::max(section.step, 1 + steps->global_step - group.last.first_step);
  }
  return section;
}

}  // namespace muster::detail::data
