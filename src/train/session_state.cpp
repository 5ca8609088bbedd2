#include "train/session_state.hpp"

#include "base/log.hpp"
#include "checkpoint/state/collect.hpp"
#include "muster/error.hpp"

#include <algorithm>

namespace muster::detail::train {

const checkpoint::Restored& SessionState::read_start() {
  if (!restored) restored = store.read(*start);
  return *restored;
}

std::shared_ptr<data::ShardState> SessionState::shard(const std::string& name) {
  if (const auto found = shards.find(name); found != shards.end()) return found->second;
  const auto dataset = datasets.find(name);
  if (dataset == datasets.end()) {
    std::string names;
    for (const auto& [known, unused] : datasets) names += (names.empty() ? "" : ", ") + known;
    throw Error(ExitCode::user_error, "taking the shard of the dataset \"" + name + "\"",
                "the trainer was given no such dataset",
                names.empty() ? "Give it one in the option datasets" : "It has " + names);
  }
  const auto& split = data_config.datasets_to_split;
  const bool is_split = data_config.split_all || std::find(split.begin(), split.end(), name) != split.end();
  auto state = std::make_shared<data::ShardState>(
      data::Track{.name = name, .share = share, .split = is_split, .seed = launch.flags().seed}, dataset->second,
      device);
  passes->add(state);
  shards.emplace(name, state);
  return state;
}

void SessionState::tell_beginning(bool saves) {
  if (!start || beginning_told || !(checkpoint_taken || saves)) return;
  beginning_told = true;
  if (!root()) return;
  const auto name = start->path().filename().string();
  if (!checkpoint_taken)
    log::warn("the run goes on from " + name +
              ", but the training function has restored nothing from it; call state.restore() before the first epoch");
  else if (training_iteration > 0)
    log::warn("the run goes on from " + name + ", which the training function loads by itself: training_iteration is " +
              std::to_string(training_iteration) + ", but " + (epoch_set ? "" : "epoch, ") +
              "global_step, the position in the data and the random state begin again; state.restore() takes up all");
}

void SessionState::watch_passes() {
  watch = std::make_shared<data::Passes::Watch>(data::Passes::Watch{
      .on_batch =
          [this](const data::Track& track, const step::StepWeight& step, std::int64_t samples) {
            tell_beginning(false);
            if (!step.completes_step()) return;
            ++global_step;
            samples_since_report += samples;
            sinks.batch({.epoch = epoch, .epochs = epochs, .consumed = track.consumed, .samples = track.samples});
          },
      .on_shard =
          [this](int shard) {
            if (!generators) return;
            if (shard < 0) return generators->leave();
            generators->enter(shard);
            for (const auto& model : models) model->enter(shard);
          },
      .on_next = [this] { heed_stop(); },
      .on_epoch =
          [this](std::int64_t value) {
            epoch = value;
            epoch_set = true;
          }});
  passes->watch = watch;
}

std::string SessionState::save_random_state() { return generators ? generators->state() : generator_state(device); }

void SessionState::restore_random_state(const checkpoint::Restored& saved) {
  const auto size = generators ? generators->state_size() : 0;
  if (!generators && saved.random_state)
    set_generator_state(*saved.random_state, device);
  else
    seed_generators(launch.flags().seed + static_cast<std::uint64_t>(training_iteration), workers.rank());
  if (generators && saved.random_states.size() == size * static_cast<std::size_t>(workers.size()))
    generators->restore(saved.random_states.substr(size * static_cast<std::size_t>(workers.rank()), size));
}

bool SessionState::restore_what_is_there(const StateEntries& entries) {
  StateEntries there;
  StateDict saved;
  std::string missing;
  for (const auto& [name, entry] : entries) {
    if (!restored->state.values.contains(name)) {
      missing += (missing.empty() ? "" : ", ") + name;
      continue;
    }
    there.emplace_back(name, entry);
    auto part = checkpoint::only(restored->state, name);
    saved.tensors.merge(part.tensors);
    saved.values.update(part.values);
  }
  checkpoint::restore(there, saved, {workers.rank(), workers.size()});
  if (!missing.empty() && root())
    log::warn(start->path().string() + " holds nothing for " + missing + ": left as it is" +
              (restored->state.values.empty() ? "; files of your own are reached by get_checkpoint()" : ""));
  return !there.empty();
}

Json SessionState::save_progress(bool in_report) const {
  return to_json(checkpoint::TrainerState{
      .of_a_run = true,
      .training_iteration = training_iteration,
      .epoch = epoch,
      .epoch_complete = passes->epoch_complete(),
      .global_step = global_step,
      .samples_since_report = in_report ? 0 : samples_since_report,
      .time_total_s = time_before + std::chrono::duration<double>(Clock::now() - begin).count(),
      .seed = launch.flags().seed,
      .positions = passes->positions().get<std::map<std::string, Json>>(),
      .preprocessor = preprocessor ? preprocessor->state() : Json(nullptr)});
}

void SessionState::restore_progress(const checkpoint::TrainerState& progress) {
  global_step = progress.global_step;
  samples_since_report = progress.samples_since_report;
  const bool complete = progress.epoch_complete;
  epoch = progress.epoch + (complete ? 1 : 0);
  passes->begin_epoch(epoch);
  for (const auto& [name, position] : progress.positions) passes->restore(name, position, complete);
}

}  // namespace muster::detail::train
