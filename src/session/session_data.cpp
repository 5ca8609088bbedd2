#include "session/session_data.hpp"

#include "base/log.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "observe/metrics.hpp"

#include <algorithm>

namespace muster::detail::session {

std::shared_ptr<data::ShardState> SessionData::shard(const std::string& name, const WorkerContext& workers) {
  if (const auto found = shards.find(name); found != shards.end()) return found->second;
  const auto dataset = datasets.find(name);
  if (dataset == datasets.end()) {
    std::string names;
    for (const auto& [known, unused] : datasets) names += (names.empty() ? "" : ", ") + known;
    throw Error(ExitCode::user_error, "taking the shard of the dataset \"" + name + "\"",
                "the trainer was given no such dataset",
                names.empty() ? "Give it one in the option datasets" : "It has " + names);
  }
  const auto& split = config.datasets_to_split.names();
  const bool is_split = config.split_all.value_or(false) || std::find(split.begin(), split.end(), name) != split.end();
  const bool is_stream = data::source_of(dataset->second)->is_stream();
  const bool agrees_on_steps = is_stream || data::source_of(dataset->second)->draws();
  auto state = std::make_shared<data::ShardState>(
      data::PassPositionOptions{.name = name,
                                .share = workers.share,
                                .full_worker_count = workers.full_worker_count,
                                .split = is_split,
                                .seed = workers.seed,
                                .resumable = !is_stream,
                                .stream = is_stream},
      dataset->second, workers.device, agrees_on_steps ? std::optional(workers.control) : std::nullopt);
  pass_positions->add(state);
  return shards.emplace(name, state).first->second;
}

Json SessionData::ledgers(const Communicator& workers) const {
  auto all = Json::object();
  for (const auto& [name, dataset] : datasets)
    if (auto ledger = data::source_of(dataset)->ledger(workers); !ledger.is_null()) all.update(ledger);
  return all;
}

void SessionData::prepare_preprocessor(const Json& saved, bool own, const Communicator& control,
                                       std::optional<bool> had_one) {
  if (!preprocessor) {
    if (saved.is_null() && !had_one.value_or(false)) return;
    const char* const fact = "the checkpoint was saved with one, and the trainer has none";
    if (own) throw Error(ExitCode::usage, "restoring the preprocessor", fact, "Give the trainer the same one again");
    log::warn(str("preprocessing: ", fact, "; the data are not preprocessed"));
    return;
  }
  if (own && !had_one.value_or(true))
    throw Error(ExitCode::usage, "restoring the preprocessor", "the checkpoint was saved without one",
                "Give the trainer none, or start another run from this checkpoint");
  const bool fitted = control.all_reduce(std::int64_t{!preprocessor->fitted()}) == 0;
  if (!saved.is_null() && (own || !fitted)) {
    try {
      preprocessor->load_state(saved);
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, "restoring the preprocessor", error.what(),
                  "Build the same preprocessor as the run that was saved");
    }
  } else if (fitted) {
    // Nothing to do: the user or an earlier attempt has fitted the preprocessor.
  } else if (const auto train = datasets.find("train"); train != datasets.end()) {
    const auto& source = data::source_of(train->second);
    if (source->is_stream())
      throw Error(ExitCode::usage, "fitting the preprocessor", "the dataset \"train\" is a stream",
                  "Fit it on a dataset of files, tensors or items, and give the trainer the fitted one");
    preprocessor->fit(source->draws() ? data::dataset_of(source->to_fit()) : train->second, control);
  } else {
    throw Error(ExitCode::user_error, "fitting the preprocessor", "there is no dataset \"train\"",
                "Give the trainer one, or a preprocessor that is fitted already");
  }
  for (auto& [name, dataset] : datasets) dataset = dataset.transform(preprocessor);
}

void SessionData::warn_of_unsplit_data(const std::vector<Json>& metrics, const WorkerContext& workers) {
  if (has_warned_of_unsplit_data) return;
  std::string whole;
  for (const auto& [name, shard] : shards)
    if (!shard->options().split) whole += (whole.empty() ? "\"" : ", \"") + name + "\"";
  if (whole.empty()) return;
  const auto metric = observe::matrix_counted_by_all_ranks(metrics);
  if (metric.empty()) return;
  has_warned_of_unsplit_data = true;
  if (workers.is_first())
    log::warn(str(
        "reporting \"", metric, "\": all ", workers.size(),
        " workers have counted the same number of samples of each class. Datasets that are not split are whole on each "
        "worker, so each sample counts once per worker: ",
        whole, ". Set split_all in dataset_config (DataConfig), or name them in datasets_to_split"));
}

}  // namespace muster::detail::session
