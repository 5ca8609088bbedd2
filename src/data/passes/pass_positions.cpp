#include "data/passes/pass_positions.hpp"

#include "base/log.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::data {

void PassPositions::add(const std::shared_ptr<PassPosition>& pass_position) {
  const auto& options = pass_position->options();
  const auto& name = options.name;
  if (const auto found = pass_positions_.find(name); found != pass_positions_.end()) {
    const auto& other = found->second->options();
    const char* const remedy = "Give each a name of its own: DataLoaderOptions{.name = …}";
    if (other.loader != options.loader)
      throw Error(ExitCode::usage, "taking the data \"" + name + "\"", "a dataset and a data loader have that name",
                  remedy);
    if (options.loader && other.resumable != options.resumable)
      throw Error(ExitCode::usage, "taking the data \"" + name + "\"",
                  "two data loaders have that name, and only one of them has a sampler of its own", remedy);
  }
  pass_position->owner_ = weak_from_this();
  pass_position->steps_ = steps;
  pass_position->begin_epoch(steps->epoch.number);
  const auto before = std::exchange(pass_positions_[name], pass_position);
  // The name was registered before, and the restored position was not used there: this pass position takes it.
  if (const auto saved = restored_.find(name); before && before->is_restored() && saved != restored_.end())
    pass_position->restore(saved->second.position, saved->second.complete);
  if (const auto saved = waiting_.extract(name)) restore(name, saved.mapped().position, saved.mapped().complete);
}

std::shared_ptr<PassPosition> PassPositions::find_loader(const std::string& name) const {
  const auto found = pass_positions_.find(name);
  return found != pass_positions_.end() && found->second->options().loader ? found->second : nullptr;
}

void PassPositions::enter_epoch(std::int64_t epoch) {
  if (const auto live = steps->listener.lock()) live->epoch_begun();
  if (epoch != steps->epoch.number) {
    for (auto& [name, saved] : waiting_) saved.complete = true;
    steps->epoch.last_complete = -1;
  }
  steps->epoch.number = epoch;
}

void PassPositions::enter_loop() {
  steps->epoch.loop = step::EpochLoop::in_loop;
  for (auto& [name, pass_position] : pass_positions_) pass_position->enter_loop();
}

void PassPositions::begin_epoch(std::int64_t epoch) {
  steps->epoch.count = std::max(steps->epoch.count, step::EpochCount::by_loop);
  resume_epoch(epoch);
  resumed_epoch_ = -1;
}

void PassPositions::resume_epoch(std::int64_t epoch) {
  resumed_epoch_ = epoch;
  enter_epoch(epoch);
  for (auto& [name, pass_position] : pass_positions_) pass_position->begin_epoch(epoch);
}

void PassPositions::set_epoch(std::int64_t epoch) {
  if (const auto resumed = std::exchange(resumed_epoch_, -1); epoch < resumed)
    log::warn(
        str("setting epoch ", epoch, ": the run goes on in epoch ", resumed,
            ", and the epochs before it are trained again. Begin the loop at an epoch that the State holds, or loop "
            "over session.epochs(n)"));
  enter_epoch(epoch);
  steps->epoch.count = step::EpochCount::own;
  for (auto& [name, pass_position] : pass_positions_)
    if (!pass_position->epoch_set_) pass_position->begin_epoch(epoch);
}

Json PassPositions::positions() const {
  Json all = Json::object();
  for (const auto& [name, saved] : waiting_)
    if (!saved.complete) all[name] = saved.position;
  for (const auto& [name, pass_position] : pass_positions_)
    if (pass_position->options().split) all[name] = pass_position->position();
  return all;
}

void PassPositions::restore(const std::string& name, const Json& position, bool complete) {
  const auto pass_position = pass_positions_.find(name);
  if (pass_position == pass_positions_.end())
    waiting_[name] = {position, complete};
  else
    pass_position->second->restore(position, complete), restored_[name] = {position, complete};
}

PassPositions::EpochProgress PassPositions::epoch_progress() const {
  const auto& epoch = steps->epoch;
  bool data = false, unfinished = false, passed = epoch.has_left_loop();
  for (const auto& [name, pass_position] : pass_positions_) {
    if (!pass_position->options().split || pass_position->only_evaluated()) continue;
    data = true;
    passed = passed || pass_position->passes_of(epoch.has_looped()).epoch.passes > 0;
    unfinished = unfinished || pass_position->unfinished();
  }
  for (const auto& [name, saved] : waiting_) {
    if (saved.complete || !saved.position.is_object()) continue;
    data = true;
    passed = passed || saved.position.value("passes", 0) > 0;
    unfinished = unfinished || saved.position.value("consumed", 0) > 0 || saved.position.contains("outside");
  }
  if (!data) return EpochProgress::unknown;
  const auto finished = finished_passes();
  const bool between =
      epoch.is_counted() && !epoch.has_left_loop() && finished > 0 && finished <= epoch.passes_before_more;
  return unfinished || (passed && between) ? EpochProgress::under_way
         : passed                          ? EpochProgress::over
                                           : EpochProgress::none;
}

std::int64_t PassPositions::finished_passes() const {
  std::int64_t finished = 0;
  for (const auto& [name, pass_position] : pass_positions_)
    if (const auto& passes = pass_position->passes_of(steps->epoch.has_looped());
        pass_position->options().split && passes.epoch.number == steps->epoch.number)
      finished += passes.repeated_passes();
  for (const auto& [name, saved] : waiting_)
    if (!saved.complete && saved.position.is_object()) finished += saved.position.value("finished", std::int64_t{0});
  return finished;
}

void PassPositions::note_more_passes() {
  const auto finished = finished_passes();
  auto& epoch = steps->epoch;
  epoch.passes_before_more = std::max(epoch.passes_before_more, finished);
  if (std::exchange(epoch.resumed_after, 0) == finished && finished > 0)
    log::warn(
        "the State that this run was resumed from was saved between two passes of the run's first epoch, before "
        "muster could know that an epoch has several. The other passes of that epoch were left out");
}

void PassPositions::end_epoch() {
  // The epoch that ends shows how many passes an epoch has now.
  if (const auto finished = finished_passes(); finished > 0)
    steps->epoch.passes_before_more = std::min(steps->epoch.passes_before_more, finished - 1);
}

std::string PassPositions::name_of_unfinished_pass() const {
  for (const auto& [name, pass_position] : pass_positions_)
    if (pass_position->options().split && pass_position->passes_of(steps->epoch.has_looped()).has_rest()) return name;
  return {};
}

std::string PassPositions::name_of_pass_not_resumed(bool in_loop) const {
  for (const auto& [name, pass_position] : pass_positions_)
    if (const auto& passes = pass_position->passes_of(in_loop); passes.resume_pending && passes.skipped) return name;
  return {};
}

std::string PassPositions::name_of_unused_position() const {
  for (const auto& [name, saved] : waiting_)
    if (!saved.complete && saved.position.is_object() &&
        (saved.position.value("finished", 0) > 0 || saved.position.value("consumed", 0) > 0))
      return name;
  return {};
}

PassPosition::Section PassPositions::section(std::int64_t epoch, bool in_loop) const {
  PassPosition::Section section{.epoch = epoch};
  if (!in_loop) section.step = steps->epoch.call + 1, section.after_loop = steps->epoch.is_after_loop();
  for (const auto& [name, pass_position] : pass_positions_) {
    const auto& passes = pass_position->passes_of(in_loop);
    if (passes.epoch.number != epoch) continue;
    section.finished += passes.repeated_passes() - passes.epoch.to_skip;
    if (passes.last.under_way) section.step = std::max(section.step, 1 + steps->global_step - passes.last.first_step);
  }
  return section;
}

}  // namespace muster::detail::data
