#include "checkpoint/inspect.hpp"

#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/state/trainer_state.hpp"
#include "checkpoint/tier.hpp"
#include "muster/checkpoint.hpp"

namespace muster {
namespace {

namespace fs = std::filesystem;
using namespace detail::checkpoint;

CheckpointInfo look_at(const fs::path& path, bool checksums) {
  CheckpointInfo info{.path = path};
  try {
    const auto manifest = read_manifest(path);
    const auto trainer = trainer_state_from_json(manifest.progress);
    info.index = manifest.index;
    info.training_iteration = trainer.training_iteration;
    info.epoch = trainer.epoch;
    info.world_size = manifest.world_size;
    for (const auto& file : manifest.files) info.bytes += file.bytes;
    info.time = manifest.time;
    info.metrics = measured(path, manifest.metrics);
    info.status = status_in(info.metrics);
    verify_sizes(path, manifest);
    if (checksums) verify(path, manifest);
  } catch (const Error& error) {
    info.problem = error.what();
    info.code = error.code();
  }
  return info;
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  std::vector<CheckpointInfo> infos;
  for (const auto& [index, path] : Tier(run).list().published) {
    infos.push_back(look_at(path, false));
    infos.back().index = index;
  }
  return infos;
}

CheckpointInfo verify_checkpoint(const fs::path& path) {
  Checkpoint::from_directory(path);
  return look_at(path, true);
}

std::vector<CheckpointInfo> detail::checkpoint::reported(const fs::path& run, const std::vector<Rollback>& rollbacks) {
  auto all = list_checkpoints(run);
  std::erase_if(
      all, [&](const CheckpointInfo& info) { return !info.problem.empty() || rolled_back(rollbacks, info.index); });
  return all;
}

std::string detail::checkpoint::problem_seen(const std::function<void()>& look) {
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

std::optional<fs::path> detail::checkpoint::newest_whole(const fs::path& run) {
  auto there = Tier(run).list();
  const auto rollbacks = read_rollbacks(run);
  while (const auto newest = newest_of(there, rollbacks)) {
    const auto& [index, path] = *newest;
    const auto problem = problem_seen([&] { verify_sizes(path, read_manifest(path)); });
    if (problem.empty()) return path;
    detail::log::warn(path.string() + " is damaged and passed over: " + problem);
    there.published.erase(index);
  }
  return {};
}

}  // namespace muster
