// A session that has been asked to stop.
#include "base/log.hpp"
#include "checkpoint/object.hpp"
#include "gradients/reducer.hpp"
#include "muster/error.hpp"
#include "train/session_state.hpp"

#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <string>
#include <utility>

namespace muster::detail::train {
namespace {

/// Gradients that wait for longer are given up: a learning rate of 0 looks like that too.
constexpr int longest_accumulation = 1000;

bool is_joined(const std::shared_ptr<gradients::DataParallel>& model) {
  const auto reducer = model->reducer();
  return reducer && reducer->joined();
}

}  // namespace

void SessionState::heed_stop() {
  // Inside join() the others may be at another place.
  if (std::any_of(models.begin(), models.end(), is_joined)) return;
  for (const auto& prepared : models)
    if (const auto reducer = prepared->reducer()) reducer->recover();
  std::int64_t averaged = 0;
  bool wished = false;
  for (const auto& prepared : models)
    if (const auto reducer = prepared->reducer()) {
      averaged += reducer->passes();
      wished = wished || reducer->stop_wished();
    }
  if (std::exchange(passes_heard, averaged) != averaged)
    stop.hear(wished);
  else
    stop.ask(control, launch.stop_requested());
  if (stop.known()) try_to_stop(false);
}

void SessionState::try_to_stop(bool in_report) {
  const auto entries = living.lock();
  const bool settled = is_settled(entries.get());
  std::array<std::int64_t, 3> everywhere{entries != nullptr, settled, !files_reported};
  control.all_reduce(std::span(everywhere), ReduceOp::min);
  const auto [lives, is_place, no_files] = everywhere;
  if (!lives && (in_report || no_files)) throw_stopped(false);
  if (!lives || !is_place) return;
  for (const auto& prepared : models) prepared->synchronise_buffers();
  save(entries.get(), std::nullopt, false, Json::object());
  throw_stopped(true);
}

bool SessionState::is_settled(const StateEntries* entries) {
  bool settled = *no_sync_depth == 0;
  std::set<const void*> known;
  for (const auto& prepared : models) {
    const auto reducer = prepared->reducer();
    if (!reducer) continue;
    settled = settled && reducer->stepped();
    for (const auto& tensor : prepared->module()->parameters()) known.insert(tensor.unsafeGetTensorImpl());
  }
  std::vector<std::vector<at::Tensor>> others;
  if (entries != nullptr)
    for (const auto& [name, entry] : *entries) {
      others.emplace_back();
      for (const auto& [path, tensor] : entry.object()->parameters())
        if (!known.contains(tensor.unsafeGetTensorImpl())) others.back().push_back(tensor);
    }
  settled = !unspent.look(others) && settled;
  if (passes->without_position() != nullptr) return false;
  unsettled_places = settled ? 0 : unsettled_places + 1;
  if (unsettled_places <= longest_accumulation) return settled;
  log::warn("no step of an optimizer was seen for " + std::to_string(longest_accumulation) +
            " batches: gradients that are still added up are not saved");
  return true;
}

void SessionState::end_training() {
  if (stop_told) throw_stopped(newest && newest->path() != (start ? start->path() : std::filesystem::path()));
}

void SessionState::throw_stopped(bool saved) {
  stopped = true;
  const auto remedy = "Start it again with --name " + run.name() + " to go on";
  const Error error = saved ? Error(ExitCode::stopped, "training",
                                    "stopped on request, state saved in " + newest->path().filename().string(), remedy)
                            : Error(ExitCode::retry, "training", "stopped on request, and there is no State to save",
                                    remedy + (newest ? " from " + newest->path().filename().string() : ""));
  throw Error(error.code(), std::string(error.what()));  // all workers have it
}

}  // namespace muster::detail::train
