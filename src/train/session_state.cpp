#include "train/session_state.hpp"

#include "base/log.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace muster::train {

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
  auto state = std::make_shared<data::ShardState>(data::ShardState{
      .name = name,
      .dataset = dataset->second,
      .share = share,
      .split = data_config.split_all || std::find(split.begin(), split.end(), name) != split.end(),
      .seed = launch.flags().seed,
      .device = device,
      .weight = weight,
  });
  state->begin_epoch(epoch);
  state->on_batch = [this, shard = state.get()](std::int64_t samples) { begin_batch(*shard, samples); };
  state->on_end = [this] {
    if (generators) generators->leave();
  };
  state->on_epoch = [this, shard = state.get()](std::int64_t value) { set_epoch(*shard, value); };
  shards.emplace(name, state);
  return state;
}

void SessionState::set_epoch(const data::ShardState& shard, std::int64_t value) {
  epoch = value;
  epoch_set = true;
  epochs_of_their_own.insert(&shard);
  for (auto& [name, other] : shards)
    if (!epochs_of_their_own.contains(other.get())) other->begin_epoch(value);
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

void SessionState::begin_batch(const data::ShardState& shard, std::int64_t samples) {
  if (!at::GradMode::is_enabled()) return;
  tell_beginning(false);
  if (generators) {
    generators->enter(weight->shard);
    for (const auto& model : models) model->enter(weight->shard);
  }
  if (!weight->completes_step()) return;
  ++global_step;
  samples_since_report += samples;
  if (progress)
    progress->step({.epoch = epoch, .epochs = epochs, .consumed = shard.consumed, .samples = shard.dataset.count()});
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

Config SessionState::save_progress() const {
  // An epoch is over when every pass that was begun in it is, and, if there is data, there was one.
  bool data = false, passed = false, unfinished = false;
  Config positions = Config::object();
  for (const auto& [name, shard] : shards) {
    if (!shard->split) continue;
    data = true;
    passed = passed || shard->passes > 0;
    unfinished = unfinished || shard->unfinished();
    positions[name] = shard->position();
  }
  return {{"training_iteration", training_iteration},
          {"epoch", epoch},
          {"epoch_complete", !unfinished && (passed || !data)},
          {"global_step", global_step},
          {"time_total_s", time_before + std::chrono::duration<double>(Clock::now() - begin).count()},
          {"seed", launch.flags().seed},
          {"positions", positions},
          {"preprocessor", preprocessor ? preprocessor->state() : Config(nullptr)}};
}

void SessionState::restore_progress(const checkpoint::Progress& progress) {
  global_step = progress.global_step;
  const bool complete = progress.epoch_complete;
  epoch = progress.epoch + (complete ? 1 : 0);
  for (const auto& [name, position] : progress.positions) {
    if (!datasets.contains(name)) continue;
    auto state = shard(name);
    state->begin_epoch(epoch);
    if (!complete) state->restore(position);
  }
}

}  // namespace muster::train
