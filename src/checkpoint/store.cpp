#include "checkpoint/store.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/pieces.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/merge.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;
namespace fs = std::filesystem;

namespace {

CheckpointConfig checked(CheckpointConfig config) {
  if (config.num_to_keep.value_or(1) < 1)
    throw Error(ExitCode::usage, "keeping checkpoints",
                str("num_to_keep is ", *config.num_to_keep, ", and the newest always stays"),
                "Give 1 or more, or leave it out to keep all");
  return config;
}

}  // namespace

// Saving: synchronously or in the background, and pruning.

CheckpointStore::CheckpointStore(Communicator communicator, std::filesystem::path run, CheckpointConfig config)
    : communicator_(std::move(communicator)),
      tier_(storage::tier_of(run)),
      config_(checked(std::move(config))),
      fast_tiers_(communicator_, tier_) {
  const auto indices = run_on_root(communicator_, [&] {
    // Listed before remove_unfinished(), since indices of interrupted saves are not used again.
    const auto there = tier_->list();
    for (const auto& path : there.others)
      log::warn(path.string() +
                " is a link or a file, not a folder, so the run does not go on from it. Move the "
                "checkpoint's folder back there");
    const int next = next_index(tier_->folder());
    tier_->remove_unfinished();
    return Json{next, std::set(there.indices.lower_bound(next), there.indices.end())};
  });
  indices_ = {indices[0], indices[1].get<std::set<int>>()};
  if (!config_.fast_tier.empty()) fast_tiers_.create_own(communicator_, config_.fast_tier);
  if (fast_tiers_.own() || config_.async_save) background_.enable(communicator_);
}

Checkpoint CheckpointStore::commit(CheckpointContents contents, Mode mode) {
  confirm_rollback();
  const int index = indices_.next_free();
  background_.begin(contents.began_at);
  const bool is_async = mode == Mode::async && background_.is_enabled();
  const auto save = std::make_shared<Save>(
      std::move(contents), index, fast_tiers_.own().value_or(SaveTarget{.tier = tier_, .is_leader = here().rank == 0}),
      last_save_);
  save->or_abandon([&] {
    save->prepare(communicator_);
    is_async ? save->take_snapshot(communicator_) : write(communicator_, *save);
  });
  indices_.next = index + 1;
  if (is_async) {
    background_.run([this, save](const Communicator& communicator) {
      save->or_abandon([&] { write(communicator, *save); });
      settle(communicator, *save);
    });
  } else if (fast_tiers_.own()) {
    background_.run([this, save](const Communicator& communicator) { settle(communicator, *save); });
  } else {
    settle(communicator_, *save);
    background_.end_without_work();
  }
  return as_this_rank(Checkpoint(tier_->published(index)));
}

void CheckpointStore::write(const Communicator& communicator, Save& save) {
  save.write(communicator);
  if (fast_tiers_.own()) {
    fast_tiers_.begin_use(communicator, save.index());
    // If another node fails now, this node may still publish a checkpoint of this index. So no later save may use it.
    indices_.next = save.index() + 1;
  }
  save.complete(communicator);
}

void CheckpointStore::settle(const Communicator& communicator, const Save& save) {
  fast_tiers_.settle(communicator, save);
  // If there is no validation function, nobody runs validations that an earlier start has left pending. So they are no
  // reason to keep a checkpoint.
  const bool validates = static_cast<bool>(is_needed_);
  if (config_.num_to_keep) run_on_root(communicator, [&] { prune(*tier_, config_, validates, is_needed_); });
}

// Restoring: the newest intact checkpoint, or the checkpoint that the run rolls back to.

std::string CheckpointStore::problem_of(const fs::path& checkpoint) const {
  Verified found{.path = checkpoint};
  const auto seen = run_on_all(communicator_, [&] {
    return data_problem([&] {
      found.manifest = read_manifest(checkpoint);
      verify_sizes(checkpoint, found.manifest);
      found.state = MappedState::open(checkpoint, found.manifest.state_file());
    });
  });
  const auto bad = std::ranges::find_if(seen, [](const auto& problem) { return !problem.empty(); });
  if (bad != seen.end()) {
    if (std::ranges::none_of(seen, &std::string::empty)) return *bad;
    const auto rank = static_cast<std::size_t>(bad - seen.begin());
    throw Error(
        ExitCode::retry, "verifying " + checkpoint.string(),
        str("other ranks see it whole, but rank ", rank, " (", communicator_.topology().hosts[rank], ") says: ", *bad),
        "The file system does not show the same files on all nodes; try again");
  }
  const auto& topology = communicator_.topology();
  const state::RankInGroup in_node{topology.local_rank, topology.local_size};
  for (auto& problem : run_on_all(communicator_, [&] {
         return data_problem([&] { verify(checkpoint, found.manifest, here(), in_node, found.state.get()); });
       }))
    if (!problem.empty()) return std::move(problem);
  verified_ = std::move(found);
  return {};
}

void CheckpointStore::restore_repaired() const {
  // Only checkpoints newer than the newest published one: the run has already continued without older ones.
  const auto candidates = run_on_root(communicator_, [&] {
    auto there = tier_->list();
    const auto rollbacks = read_rollbacks(tier_->folder());
    const auto newest = newest_own(there, rollbacks);
    auto list = Json::array();
    for (const auto& [index, path] : there.damaged)
      if (!is_rolled_back(rollbacks, index) && (!newest || index > newest->first))
        list.push_back({path.string(), index, !newest});
    return list;
  });
  for (const auto& candidate : candidates) {
    const fs::path path = candidate[0].get<std::string>();
    const bool needed = candidate[2];
    try {
      if (!problem_of(path).empty() || verified_.manifest.index != candidate[1]) continue;
    } catch (const Error& error) {
      // If there is a checkpoint to resume from, a damaged one that cannot be read is skipped.
      if (needed || !error.agreed() || error.code() != ExitCode::retry) throw;
      if (here().rank == 0) log::warn(path.filename().string() + " is left alone: " + error.what());
      continue;
    }
    run_on_root(communicator_, [&] {
      if (const int index = candidate[1]; tier_->unquarantine(index, path))
        log::warn(path.filename().string() + " is intact, and is named " + tier_->published(index).filename().string() +
                  " again");
    });
  }
}

std::optional<Checkpoint> CheckpointStore::newest() {
  if (rollback_) return as_this_rank(Checkpoint(tier_->published(rollback_->to)));
  restore_repaired();
  for (;;) {
    const int index = run_on_root(communicator_, [&] {
      auto there = tier_->list();
      if (const auto newest = newest_own(there, read_rollbacks(tier_->folder()))) return newest->first;
      const auto doing = "looking for a checkpoint in " + tier_->folder().string();
      if (!there.published.empty())
        throw Error(ExitCode::data, doing,
                    "the checkpoint to which the run was rolled back is gone, and the later ones were given up",
                    "Name the one to go on from: --resume " + there.published.rbegin()->second.string());
      if (!there.damaged.empty())
        throw Error(ExitCode::data, doing, str("all that are there are damaged (", there.damaged.size(), ")"),
                    "`muster checkpoint verify` says what is wrong with each. The next start uses one that has been "
                    "repaired. To start from the beginning, give the run another name");
      return -1;
    });
    if (index < 0) return {};
    const auto path = tier_->published(index);
    const auto problem = problem_of(path);
    if (problem.empty()) return as_this_rank(Checkpoint(path));
    run_on_root(communicator_, [&] {
      const auto new_path = tier_->quarantine(index);
      log::warn(path.filename().string() + " is damaged and now named " + new_path.filename().string() + ": " +
                problem);
      move_names(index);
    });
  }
}

void CheckpointStore::move_names(std::optional<int> quarantined) const {
  const auto rollbacks = read_rollbacks(tier_->folder());
  const auto published = tier_->list().published;
  std::map<std::string, int> checkpoints;  // the newest checkpoint, by the name that its report gave
  for (const auto& [index, path] : published) try {
      if (is_rolled_back(rollbacks, index)) continue;
      const auto manifest = read_manifest(path);
      const auto name = manifest.metrics.value("checkpoint_name", Json());
      if (manifest.index == index && name.is_string()) checkpoints[name] = index;
    } catch (const Error&) {
      // The names of a damaged checkpoint stay as they are.
    }
  const auto move_names_of = [&](int index) {
    for (const auto& name : tier_->names(index))
      if (const auto before = checkpoints.find(name); before != checkpoints.end())
        tier_->set_name(before->second, name);
      else
        tier_->remove_name(name);
  };
  for (const auto& [index, path] : published)
    if (is_rolled_back(rollbacks, index)) move_names_of(index);
  if (quarantined) move_names_of(*quarantined);
}

/// Called if this is the checkpoint of the last rollback. Moves the names again, since a killed job may not have done
/// so.
void CheckpointStore::log_rolled_back(int index) const {
  move_names();
  log::info("this run has gone back to " + tier_->published(index).filename().string() +
            " already and goes on from its newest checkpoint. To go back once more, remove its steps_back.json");
}

bool CheckpointStore::has_rolled_back(const std::string& name) const {
  const auto rollbacks = read_rollbacks(tier_->folder());
  const bool done = !rollbacks.empty() && !name.empty() && rollbacks.back().name == name;
  if (done) log_rolled_back(rollbacks.back().to);
  return done;
}

void CheckpointStore::roll_back(int index, const std::string& name) {
  const auto path = tier_->published(index);
  const bool done = run_on_root(communicator_, [&] {
    const auto rollbacks = read_rollbacks(tier_->folder());
    if (!rollbacks.empty() && rollbacks.back().to == index) {
      log_rolled_back(index);
      return true;
    }
    if (!tier_->list().published.contains(index))
      throw Error(ExitCode::data, "going back to " + path.string(), "there is no such checkpoint",
                  "`muster checkpoint ls " + tier_->folder().string() + "` shows those that are there");
    return false;
  });
  if (done) return;
  if (const auto problem = problem_of(path); !problem.empty()) throw Error(ExitCode::data, problem);
  if (verified_.manifest.index != index)
    throw Error(ExitCode::data, "going back to " + path.string(),
                str("it is a copy of the checkpoint ", verified_.manifest.index),
                "Name that checkpoint, if it is still there");
  rollback_ = {index, indices_.next - 1, name};
}

void CheckpointStore::confirm_rollback() {
  if (!rollback_) return;
  comm::wait_for_all(communicator_);  // so that a killed job does not record a rollback that a rank could not carry out
  run_on_root(communicator_, [&] {
    rollback_->tiers = used_tiers(*tier_);
    add_rollback(tier_->folder(), *rollback_);
    move_names();
  });
  rollback_.reset();
  fast_tiers_.release_earlier(communicator_);  // the newer checkpoints in these tiers are rolled back, too
}

std::vector<Rollback> CheckpointStore::rollbacks() const {
  auto all = read_rollbacks(tier_->folder());
  if (rollback_) all.push_back(*rollback_);
  return all;
}

Checkpoint CheckpointStore::resolved(Checkpoint checkpoint) {
  std::error_code error;
  auto path = fs::canonical(checkpoint.path_, error);
  if (error)
    throw Error(ExitCode::retry, "starting from " + checkpoint.path_.string(), error.message(),
                "Name a checkpoint that stays: another run may prune its own, and its names move");
  require_same_folder(path, checkpoint.folder_);
  checkpoint.path_ = std::move(path);
  return checkpoint;
}

Checkpoint CheckpointStore::as_this_rank(Checkpoint checkpoint) const {
  checkpoint.rank_ = communicator_.rank();
  checkpoint.ranks_ = communicator_.size();
  return checkpoint;
}

RestoredCheckpoint CheckpointStore::read(const Checkpoint& checkpoint) const {
  const auto& path = checkpoint.path();
  const auto doing = "reading " + path.string();
  RestoredCheckpoint restored;
  // All ranks must see the same manifest of a run's checkpoint. Other checkpoints may differ by rank.
  const auto manifests = run_on_all(communicator_, [&] {
    if (!fs::exists(status_of(path)))
      throw Error(ExitCode::retry, doing, "it is not there any more",
                  "Name a checkpoint that stays: another run may prune its own, and its names move");
    if (!is_checkpoint(path) && !fs::exists(status_of(path / state_name))) return Json{"files"};
    const auto& manifest = path == verified_.path ? verified_.manifest : read_manifest(path);
    const auto text = to_text(manifest);
    restored.manifest_checksum = crc32(std::as_bytes(std::span(text)));
    return manifest.position_json.empty() ? Json{"entries"} : Json{"run", restored.manifest_checksum};
  });
  const auto kind_of = [](const Json& manifest) { return manifest[0].get<std::string>(); };
  const auto kind = kind_of(manifests.front());
  if (std::ranges::any_of(manifests, [&](const auto& manifest) { return kind_of(manifest) != kind; }))
    throw Error(ExitCode::usage, doing, "the ranks give different kinds of checkpoints",
                "Give the same checkpoint on every rank");
  if (std::ranges::any_of(manifests, [&](const auto& manifest) { return manifest != manifests.front(); }))
    throw Error(
        ExitCode::retry, doing, "the ranks see different checkpoints",
        "Give the same checkpoint on every rank. If it is named by a link, which may have been moved meanwhile, "
        "start again");
  if (kind == "files") return restored;
  if (kind == "entries") {
    restored.state = merge_entries(communicator_, checkpoint);
    return restored;
  }
  if (path != verified_.path)
    if (const auto problem = problem_of(path); !problem.empty()) throw Error(ExitCode::data, problem);
  run_on_all(communicator_, [&] {
    const auto [verified, manifest, state] = std::exchange(verified_, {});
    restored.state = {.tensors = state ? state->tensors(manifest) : read_tensors(path, manifest),
                      .values = manifest.values};
    restored.position_json = manifest.position_json;
    restored.position = state::training_position_from_json(manifest.position_json);
    restored.metrics = manifest.metrics;
    restored.per_rank = manifest.per_rank;
    restored.world_size = manifest.world_size;
  });
  if (const auto random = restored.state.tensors.extract(random_name)) {
    const auto& states = random.mapped();  // [world_size, bytes]; read_manifest() has checked this
    restored.random_states.assign(static_cast<const char*>(states.const_data_ptr()), states.nbytes());
    if (const auto bytes = static_cast<std::size_t>(states.size(1)); restored.world_size == here().size && bytes > 0)
      restored.random_state = restored.random_states.substr(bytes * static_cast<std::size_t>(here().rank), bytes);
  }
  return restored;
}

}  // namespace muster::detail::checkpoint
