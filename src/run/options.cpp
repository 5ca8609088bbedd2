// Option structs as JSON: the fields of each struct, and how each type of field is written and read.
#include "run/options.hpp"

#include "muster/trainer.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace muster {
namespace detail::run {
namespace {

using std::chrono::milliseconds;

// Fields that are not data, such as functions, are left out.
template <class T>
constexpr bool is_data = true;
template <class Result, class... Arguments>
constexpr bool is_data<std::function<Result(Arguments...)>> = false;
template <class T>
constexpr bool is_data<std::shared_ptr<T>> = false;
template <class T>
constexpr bool is_data<std::vector<std::shared_ptr<T>>> = false;
template <>
constexpr bool is_data<ValidationFunction> = false;
template <>
constexpr bool is_data<std::map<std::string, Dataset>> = false;
template <>
constexpr bool is_data<std::optional<Checkpoint>> = false;

// Names in the order of the enumerators' values.
constexpr auto names_of(ScoreOrder) { return std::array{"max", "min"}; }
constexpr auto names_of(BadNumbers) { return std::array{"ignore", "stop", "skip", "roll_back"}; }
constexpr auto names_of(WhenBusy) { return std::array{"wait", "drop"}; }

template <class T>
Json to(const T& value) {
  if constexpr (std::is_enum_v<T>)
    return names_of(value).at(static_cast<std::size_t>(value));
  else if constexpr (std::is_same_v<T, std::filesystem::path>)
    return value.string();
  else if constexpr (std::is_same_v<T, milliseconds>)
    return value.count();
  else
    return value;
}
Json to(const NumWorkers& workers) {
  if (workers.is_range()) return {*workers.least(), *workers.most()};
  return workers.most() ? Json(*workers.most()) : Json();
}
Json to(const DatasetNames& datasets) { return datasets.given() ? Json(datasets.names()) : Json(); }
template <class T>
Json to(const std::optional<T>& value) {
  return value ? to(*value) : Json();
}

template <class T>
void from(const Json& json, T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    require_valid(json.is_boolean(), "is neither true nor false");
  } else if constexpr (std::is_integral_v<T>) {
    require_valid(json.is_number_integer(), "is not a whole number");
    require_valid(json.is_number_unsigned() ? std::in_range<T>(json.get<std::uint64_t>())
                                            : std::in_range<T>(json.get<std::int64_t>()),
                  "is out of range");
  } else if constexpr (std::is_floating_point_v<T>) {
    require_valid(json.is_number(), "is not a number");
  } else if constexpr (std::is_same_v<T, std::string>) {
    require_valid(json.is_string(), "is not a text");
  }
  json.get_to(value);
}
template <class T>
requires std::is_enum_v<T>
void from(const Json& json, T& value) {
  std::string all;
  const auto names = names_of(T{});
  for (const std::string name : names) all += (all.empty() ? "" : ", ") + name;
  const auto name = std::find(names.begin(), names.end(), json);
  require_valid(name != names.end(), "is none of " + all);
  value = static_cast<T>(name - names.begin());
}
void from(const Json& json, std::filesystem::path& path) {
  require_valid(json.is_string(), "is not a path");
  path = json.get<std::string>();
}
void from(const Json& json, milliseconds& duration) {
  milliseconds::rep count = 0;
  from(json, count);
  duration = milliseconds(count);
}
template <class T>
void from(const Json& json, std::optional<T>& value) {
  if (json.is_null()) return value.reset();
  from(json, value.emplace(T{}));
}
void from(const Json& json, std::vector<std::string>& names) {
  require_valid(json.is_array() && std::ranges::all_of(json, [](const Json& name) { return name.is_string(); }),
                "is not a list of names");
  json.get_to(names);
}
void from(const Json& json, NumWorkers& workers) {
  int least = 0, most = 0;
  if (json.is_null()) {
    workers = {};
  } else if (json.is_array()) {
    require_valid(json.size() == 2, "is not a number, or the least and the most");
    from(json[0], least);
    from(json[1], most);
    workers = {least, most};
  } else {
    from(json, most);
    workers = most;
  }
}
void from(const Json& json, DatasetNames& datasets) {
  std::vector<std::string> names;
  if (json.is_null()) {
    datasets = DatasetNames::not_given();
  } else {
    from(json, names);
    datasets = std::move(names);
  }
}

/// Takes the first name off `names`, a list like "a, b, c". Returns the JSON key of a field of type T with that name.
template <class T>
std::string take_key(std::string_view& names) {
  std::string key(names.substr(0, names.find(',')));
  names.remove_prefix(std::min(names.size(), key.size() + 2));
  return std::is_same_v<T, milliseconds> || std::is_same_v<T, std::optional<milliseconds>> ? key + "_ms" : key;
}

template <class... Fields>
void write(Json& json, std::string_view names, const Fields&... fields) {
  json = Json::object();
  const auto put = [&]<class T>(const T& field) {
    const auto key = take_key<T>(names);
    if constexpr (is_data<T>) json[key] = to(field);
  };
  (put(fields), ...);
}

template <class... Fields>
void read(const Json& json, std::string_view names, Fields&... fields) {
  require_valid(json.is_object(), "is not an object");
  std::vector<std::string> known;
  const auto take = [&]<class T>(T& field) {
    const auto key = take_key<T>(names);
    if constexpr (is_data<T>) {
      known.push_back(key);
      if (const auto found = json.find(key); found != json.end()) with_parent_key(key, [&] { from(*found, field); });
    }
  };
  (take(fields), ...);
  for (const auto& [key, value] : json.items())
    with_parent_key(key,
                    [&, &key = key] { require_valid(std::ranges::find(known, key) != known.end(), "is no option"); });
}

}  // namespace
}  // namespace detail::run

// Defines to_json and from_json. The list has all fields of the struct in their order; one that lacks a field does not
// compile.
#define MUSTER_OPTIONS(Type, ...)                        \
  void to_json(Json& json, const Type& options) {        \
    const auto& [__VA_ARGS__] = options;                 \
    detail::run::write(json, #__VA_ARGS__, __VA_ARGS__); \
  }                                                      \
  void from_json(const Json& json, Type& options) {      \
    auto& [__VA_ARGS__] = options;                       \
    detail::run::read(json, #__VA_ARGS__, __VA_ARGS__);  \
  }

MUSTER_OPTIONS(ScalingConfig, num_workers, use_gpu, threads_per_worker, virtual_workers)
MUSTER_OPTIONS(CheckpointConfig, num_to_keep, checkpoint_score_attribute, checkpoint_score_order, async_save, when_busy,
               fast_tier)
MUSTER_OPTIONS(FailureConfig, max_failures, max_preemption_failures, bad_numbers, bad_numbers_limit)
MUSTER_OPTIONS(LoggingConfig, level, file, per_rank)
MUSTER_OPTIONS(RunConfig, name, storage_path, checkpoint_config, failure_config, logging_config, callbacks)
MUSTER_OPTIONS(TorchConfig, backend, timeout)
MUSTER_OPTIONS(DataConfig, datasets_to_split, split_all)
MUSTER_OPTIONS(TrainerOptions, train_loop_config, backend_config, torch_config, scaling_config, dataset_config,
               run_config, datasets, preprocessor, metadata, resume_from_checkpoint, validation)
MUSTER_OPTIONS(ValidationConfig, function, timeout)

#undef MUSTER_OPTIONS

}  // namespace muster
