#include "checkpoint/inspect.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/rollbacks.hpp"
#include "muster/checkpoint.hpp"
#include "state/training_position.hpp"
#include "storage/tier.hpp"

#include <algorithm>
#include <ranges>

namespace muster {
namespace {

namespace fs = std::filesystem;
using namespace detail::checkpoint;

CheckpointInfo look_at(const fs::path& path, bool checksums) {
  CheckpointInfo info{.path = path};
  try {
    const auto manifest = read_manifest(path);
    const auto position = detail::state::training_position_from_json(manifest.position_json);
    info.index = manifest.index;
    info.training_iteration = position.training_iteration;
    info.epoch = position.epoch;
    info.world_size = manifest.world_size;
    for (const auto& file : manifest.files) info.bytes += file.bytes;
    info.time = manifest.time;
    info.metrics = with_validation(path, manifest.metrics);
    info.status = status_from(info.metrics);
    verify_sizes(path, manifest);
    if (checksums) verify(path, manifest);
  } catch (const Error& error) {
    info.problem = error.what();
    info.code = error.code();
  }
  return info;
}

/// Examines a checkpoint that was renamed to ….damaged. It has a problem even if the quick examination, without
/// checksums, finds none.
CheckpointInfo look_at_damaged(int index, const fs::path& path) {
  auto info = look_at(path, false);
  info.index = index;
  if (!info.problem.empty()) return info;
  info.problem = "a start has found it damaged; `muster checkpoint verify` says what is wrong with it";
  info.code = ExitCode::data;
  return info;
}

/// Returns the index in the folder's manifest; none if the manifest cannot be read.
std::optional<int> index_in_manifest(const fs::path& folder) try {
  return read_manifest(folder).index;
} catch (const Error&) {
  return {};
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  std::vector<CheckpointInfo> infos;
  const auto there = detail::storage::tier_of(run)->list();
  bool has_vanished = false;
  for (const auto& [index, path] : there.published) {
    auto info = look_at(path, false);
    // The run's job may just have pruned it.
    if (!info.problem.empty() && !fs::exists(detail::status_of(path))) {
      has_vanished = true;
      continue;
    }
    if (info.problem.empty() && info.index != index) {
      info.problem = detail::str("it is a copy of the checkpoint ", info.index);
      info.code = ExitCode::data;
    }
    info.index = index;
    infos.push_back(std::move(info));
  }
  // All checkpoints that were listed were pruned meanwhile, so there must be a newer one: list again.
  if (has_vanished && infos.empty()) return list_checkpoints(run);
  for (const auto& [index, path] : there.damaged) infos.push_back(look_at_damaged(index, path));
  std::ranges::stable_sort(infos, {}, &CheckpointInfo::index);
  return infos;
}

CheckpointInfo verify_checkpoint(const fs::path& path) {
  const auto folder = Checkpoint::from_directory(path).path();
  const auto id = folder_id(folder);
  auto info = look_at(folder, true);
  require_same_folder(folder, id);
  info.path = path;
  return info;
}

std::vector<CheckpointInfo> detail::checkpoint::intact_checkpoints(const fs::path& run,
                                                                   const std::vector<Rollback>& rollbacks) {
  auto all = list_checkpoints(run);
  std::erase_if(
      all, [&](const CheckpointInfo& info) { return !info.problem.empty() || is_rolled_back(rollbacks, info.index); });
  return all;
}

std::string detail::checkpoint::data_problem(const std::function<void()>& look) {
  try {
    look();
    return {};
  } catch (const NewerFormat&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return error.what();
  }
}

std::optional<int> detail::checkpoint::copied_index(int index, const fs::path& folder) {
  const auto in_manifest = index_in_manifest(folder);
  return in_manifest == index ? std::nullopt : in_manifest;
}

std::optional<std::pair<int, fs::path>> detail::checkpoint::newest_own(detail::storage::Tier::Listing& there,
                                                                       const std::vector<Rollback>& rollbacks) {
  for (;;) {
    auto newest = newest_not_rolled_back(there, rollbacks);
    if (!newest || !copied_index(newest->first, newest->second)) return newest;
    there.published.erase(newest->first);
  }
}

int detail::checkpoint::next_index(const fs::path& run) {
  constexpr int widest_gap = 1'000'000;
  const auto there = detail::storage::tier_of(run)->list();
  auto indices = there.indices;
  int next = 0;
  for (const auto& [index, path] : there.published | std::views::reverse) {
    const auto manifest_index = index_in_manifest(path);
    if (manifest_index && *manifest_index != index) {
      indices.erase(index);
      detail::log::warn(detail::str(path, " is a copy of the checkpoint ", *manifest_index,
                                    ", so the run does not go on from it. Move it out of the run's folder"));
    } else if (manifest_index) {
      next = index + 1;
      break;
    }
  }
  for (const auto& rollback : read_rollbacks(run)) next = std::max(next, rollback.last_index + 1);
  for (const int index : indices)
    if (index < next + widest_gap) next = std::max(next, index + 1);
  if (next > detail::storage::Tier::max_index)
    throw Error(ExitCode::data, "numbering the next checkpoint of " + run.string(),
                detail::str("the highest index is ", detail::storage::Tier::max_index, ", and it is in use"),
                "Look for it in the names of the checkpoints there and in steps_back.json, or give the run another "
                "name");
  return next;
}

std::optional<fs::path> detail::checkpoint::newest_intact(const fs::path& run) {
  auto there = detail::storage::tier_of(run)->list();
  const auto rollbacks = read_rollbacks(run);
  while (const auto newest = newest_own(there, rollbacks)) {
    const auto& [index, path] = *newest;
    const auto problem = data_problem([&] { verify_sizes(path, read_manifest(path)); });
    if (problem.empty()) return path;
    detail::log::warn(path.string() + " is damaged and passed over: " + problem);
    there.published.erase(index);
  }
  return {};
}

Json detail::checkpoint::preprocessor_state(const fs::path& checkpoint) {
  return detail::state::training_position_from_json(read_manifest(checkpoint).position_json).preprocessor;
}

}  // namespace muster
