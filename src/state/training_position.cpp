#include "state/training_position.hpp"

#include "muster/error.hpp"

#include <concepts>
#include <limits>

namespace muster::detail::state {
namespace {

// Limits of valid numbers. Above 2^53 a double does not hold every whole number; no run reaches the other limits.
constexpr std::uint64_t max_count = std::uint64_t{1} << 53;
constexpr std::uint64_t max_epochs = 1'000'000'000'000;
constexpr std::uint64_t max_samples = std::numeric_limits<std::int64_t>::max();
constexpr double max_seconds = 1e12;

[[noreturn]] void refuse(const std::string& what, const std::string& fact) {
  throw Error(ExitCode::data, "reading the progress of training", what + " " + fact, "Use another checkpoint");
}

/// Returns json[key], a whole number from 0 to `most`; 0 if it is missing. Refuses other values.
template <std::integral T = std::uint64_t>
T number_at(const Json& json, const std::string& where, const char* key, std::uint64_t most) {
  const auto at = json.find(key);
  if (at == json.end()) return 0;
  const auto name = where + "\"" + key + "\"";
  if (!at->is_number_integer()) refuse(name, "is not a whole number");
  if (!at->is_number_unsigned() && at->get<std::int64_t>() < 0) refuse(name, "is negative");
  const auto value = at->get<std::uint64_t>();
  if (value > most) refuse(name, "is absurdly large");
  return static_cast<T>(value);
}

void check_position(const std::string& name, const Json& position, bool outside = false) {
  if (position.is_null()) return;
  const auto where = "of the position in \"" + name + "\" ";
  if (!position.is_object()) refuse("the position in \"" + name + "\"", "is not an object");
  for (const char* key : {"epoch", "passes", "finished", "workers"}) number_at(position, where, key, max_epochs);
  number_at(position, where, "window", max_samples);
  number_at(position, where, "steps", max_count);
  number_at(position, where, "seed", ~std::uint64_t{0});
  if (position.contains("window_seed") && !position["window_seed"].is_null())
    number_at(position, where, "window_seed", ~std::uint64_t{0});
  if (position.contains("shuffle") && !position["shuffle"].is_null() && !position["shuffle"].is_boolean())
    refuse(where + "\"shuffle\"", "is neither true nor false");
  const auto check_order = [&](const char* key, const char* samples, const char* hash) {
    const auto at = position.find(key);
    if (at == position.end()) return;
    if (!at->is_object()) refuse(where + "\"" + key + "\"", "is not an object");
    number_at(*at, where + "\"" + key + "\" ", samples, max_samples);
    number_at(*at, where + "\"" + key + "\" ", hash, ~std::uint64_t{0});
  };
  check_order("draws", "count", "weights");
  check_order("buckets", "samples", "lengths");
  const auto samples = number_at(position, where, "samples", max_samples);
  const auto consumed = number_at(position, where, "consumed", max_samples);
  const auto batch = number_at(position, where, "global_batch_size", max_samples);
  if (consumed > samples) refuse(where + "\"consumed\"", "is more than there are samples");
  if (consumed > 0 && batch == 0) refuse(where + "\"global_batch_size\"", "is 0 in the middle of a pass");
  if (const auto at = position.find("in_loop"); at != position.end() && !at->is_boolean())
    refuse(where + "\"in_loop\"", "is neither true nor false");
  if (const auto at = position.find("outside"); at != position.end() && !outside) check_position(name, *at, true);
}

}  // namespace

Json to_json(const TrainingPosition& position) {
  Json json = {{"training_iteration", position.training_iteration},
               {"epoch", position.epoch},
               {"epoch_complete", position.epoch_complete},
               {"epoch_counted", position.epoch_counted},
               {"several_reports", position.several_reports},
               {"passes_before_more", position.passes_before_more},
               {"global_step", position.global_step},
               {"samples_since_report", position.samples_since_report},
               {"time_total_s", position.time_total_s},
               {"seed", position.seed},
               {"threads_per_worker", position.threads_per_worker},
               {"positions", position.positions},
               {"preprocessor", position.preprocessor},
               {"callbacks", position.callbacks}};
  if (position.has_preprocessor) json["has_preprocessor"] = *position.has_preprocessor;
  return json;
}

TrainingPosition training_position_from_json(const Json& json) {
  if (!json.is_object()) refuse("it", "is not an object");
  TrainingPosition position{.is_from_run = !json.empty()};
  position.training_iteration = number_at<std::int64_t>(json, "", "training_iteration", max_count);
  position.epoch = number_at<std::int64_t>(json, "", "epoch", max_epochs);
  position.passes_before_more = number_at<std::int64_t>(json, "", "passes_before_more", max_epochs);
  position.global_step = number_at<std::int64_t>(json, "", "global_step", max_count);
  position.samples_since_report = number_at<std::int64_t>(json, "", "samples_since_report", max_count);
  const auto flag_at = [&](const char* key, bool& flag) {
    const auto at = json.find(key);
    if (at == json.end()) return;
    if (!at->is_boolean()) refuse(std::string("\"") + key + "\"", "is neither true nor false");
    flag = at->get<bool>();
  };
  flag_at("epoch_complete", position.epoch_complete);
  flag_at("epoch_counted", position.epoch_counted);
  flag_at("several_reports", position.several_reports);
  if (const auto at = json.find("time_total_s"); at != json.end()) {
    if (!at->is_number()) refuse("\"time_total_s\"", "is not a number");
    position.time_total_s = at->get<double>();
    if (!(position.time_total_s >= 0 && position.time_total_s <= max_seconds)) refuse("\"time_total_s\"", "is absurd");
  }
  position.seed = number_at(json, "", "seed", ~std::uint64_t{0});
  position.threads_per_worker = number_at<int>(json, "", "threads_per_worker", std::numeric_limits<int>::max());
  if (const auto at = json.find("positions"); at != json.end()) {
    if (!at->is_object()) refuse("\"positions\"", "is not an object");
    for (const auto& [name, in_data] : at->items()) check_position(name, in_data);
    at->get_to(position.positions);
  }
  if (const auto at = json.find("preprocessor"); at != json.end()) position.preprocessor = *at;
  if (json.contains("has_preprocessor")) flag_at("has_preprocessor", position.has_preprocessor.emplace());
  if (const auto at = json.find("callbacks"); at != json.end()) {
    if (!at->is_object() && !at->is_null()) refuse("\"callbacks\"", "is not an object");
    position.callbacks = *at;
  }
  return position;
}

}  // namespace muster::detail::state
