#include "run/params.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/option_json.hpp"
#include "base/run_names.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/inspect.hpp"

#include <string>
#include <utility>

namespace muster::detail::run {
namespace {

/// True if `plain`, the default of an option, is a single value or JSON that the user chooses; false if it is a struct
/// of options.
bool is_whole(const Json& plain) { return !plain.is_object() || plain.empty(); }

/// Returns the part of `json` whose keys are options; `plain` has the defaults of the options.
Json known(const Json& json, const Json& plain) {
  if (is_whole(plain) || !json.is_object()) return json;
  Json result = Json::object();
  for (const auto& [key, value] : plain.items())
    if (const auto found = json.find(key); found != json.end()) result[key] = known(*found, value);
  return result;
}

/// Returns for each option the given value if it is neither empty nor the default `plain`, else the saved value.
Json merged(const Json& given, const Json& plain, const Json& saved) {
  if (is_whole(plain)) return given.empty() || given == plain ? saved : given;
  Json result;
  for (const auto& [key, value] : plain.items()) result[key] = merged(given.at(key), value, saved.at(key));
  return result;
}

}  // namespace

Json params_from_options(const TrainerOptions& options) {
  Json params = options;
  auto& run = params["run_config"];
  for (const char* part : {"checkpoint_config", "failure_config"}) {
    const auto fields = std::exchange(run[part], nullptr);
    run.erase(part);
    run.update(fields);
  }
  return params;
}

TrainerOptions options_from_params(const Json& params, const std::filesystem::path& file) try {
  if (!params.is_object()) throw InvalidOption("it", "is not an object");
  for (const char* key : {"train_loop_config", "metadata", "scaling_config", "run_config"})
    with_parent_key(key, [&] { require_valid(params.contains(key), "is missing"); });
  with_parent_key("finished", [&] {
    require_valid(params.value("finished", Json(false)).is_boolean(), "is neither true nor false");
  });
  TrainerOptions options;
  auto rest = known(params, options);
  rest.erase("run_config");
  rest.get_to(options);
  with_parent_key("run_config", [&, &run = options.run_config] {
    const auto& saved = params.at("run_config");
    known(saved, run).get_to(run);
    known(saved, run.checkpoint_config).get_to(run.checkpoint_config);
    known(saved, run.failure_config).get_to(run.failure_config);
  });
  return options;
} catch (const InvalidOption& error) {
  throw Error(ExitCode::data, "reading " + file.string(), error.key + " " + error.fact,
              "Correct it, or remove it: started with its --name, the run then goes on from its newest checkpoint");
}

TrainerOptions saved_options(const std::filesystem::path& run) {
  const std::string doing = "restoring the run " + run.string();
  const auto file = run / run_names::params;
  if (!std::filesystem::exists(status_of(file)))
    throw Error(ExitCode::data, doing, "it has no params.json", "Name the folder of a run");
  auto options = options_from_params(read_json(file), file);
  if (!checkpoint::newest_intact(run) && !checkpoint::may_hold_newer(*storage::tier_of(run)))
    throw Error(ExitCode::data, doing, "it has no whole checkpoint", "Start it again under its name, or another run");
  return options;
}

TrainerOptions restored_options(const std::filesystem::path& run, TrainerOptions given) {
  auto saved = saved_options(run);
  // Options that depend on each other are all taken from the same source.
  if (Json(given.dataset_config) != Json(DataConfig{})) saved.dataset_config = given.dataset_config;
  if (const auto& kept = given.run_config.checkpoint_config; !kept.checkpoint_score_attribute.empty())
    saved.run_config.checkpoint_config.checkpoint_score_order = kept.checkpoint_score_order;
  merged(given, TrainerOptions{}, saved).get_to(given);
  given.run_config.name = run.filename();
  given.run_config.storage_path = run.parent_path();
  return given;
}

}  // namespace muster::detail::run
