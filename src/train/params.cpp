#include "train/params.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "muster/error.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace muster::detail::train {
namespace {

template <class T>
Json or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

/// An object in the file, which knows its name.
class Part {
 public:
  Part(const Json& json, std::filesystem::path file, std::string name = {})
      : json_(json), file_(std::move(file)), name_(std::move(name)) {
    if (!json_.is_object()) refuse(name_.empty() ? "it" : name_, "is not an object");
  }

  const Json& at(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) refuse(full(key), "is missing");
    return *found;
  }
  Part part(const char* key) const { return {at(key), file_, full(key)}; }
  bool has(const char* key) const { return json_.contains(key); }

  bool flag(const char* key, bool otherwise) const {
    const auto found = json_.find(key);
    if (found == json_.end()) return otherwise;
    if (!found->is_boolean()) refuse(full(key), "is neither true nor false");
    return found->get<bool>();
  }
  /// None where it is null or missing.
  template <class T>
  std::optional<T> number(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return {};
    if (!found->is_number_integer()) refuse(full(key), "is not a whole number");
    const bool in_range = found->is_number_unsigned() ? std::in_range<T>(found->get<std::uint64_t>())
                                                      : std::in_range<T>(found->get<std::int64_t>());
    if (!in_range) refuse(full(key), "is out of range");
    return found->get<T>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    const auto found = json_.find(key);
    if (found == json_.end()) return otherwise;
    if (!found->is_string()) refuse(full(key), "is not a text");
    return found->get<std::string>();
  }
  [[noreturn]] void refuse(const std::string& what, const std::string& fact) const {
    throw Error(ExitCode::data, "reading " + file_.string(), what + " " + fact,
                "Mend it, or remove it: started with its --name, the run then goes on from its newest checkpoint");
  }
  std::string full(const char* key) const { return name_ + (name_.empty() ? "\"" : " \"") + key + "\""; }

 private:
  const Json& json_;
  std::filesystem::path file_;
  std::string name_;
};

}  // namespace

Json to_json(const Params& params) {
  const auto& [finished, train_loop_config, metadata, scaling, checkpoint, max_failures, torch, data] = params;
  return {{"train_loop_config", train_loop_config},
          {"metadata", metadata},
          {"scaling_config",
           {{"num_workers", or_null(scaling.num_workers)},
            {"use_gpu", scaling.use_gpu},
            {"threads_per_worker", or_null(scaling.threads_per_worker)},
            {"virtual_workers", or_null(scaling.virtual_workers)}}},
          {"run_config",
           {{"num_to_keep", or_null(checkpoint.num_to_keep)},
            {"checkpoint_score_attribute", checkpoint.checkpoint_score_attribute},
            {"checkpoint_score_order", checkpoint.checkpoint_score_order == ScoreOrder::max ? "max" : "min"},
            {"max_failures", max_failures}}},
          {"torch_config",
           {{"backend", torch.backend}, {"timeout_ms", torch.timeout ? Json(torch.timeout->count()) : Json()}}},
          {"dataset_config", {{"datasets_to_split", data.datasets_to_split}, {"split_all", data.split_all}}}};
}

Params params_from_json(const Json& json, const std::filesystem::path& path) {
  const Part all(json, path);
  Params params{.finished = all.flag("finished", false),
                .train_loop_config = all.at("train_loop_config"),
                .metadata = all.at("metadata")};
  const auto scaling = all.part("scaling_config");
  params.scaling = {.num_workers = scaling.number<int>("num_workers"),
                    .use_gpu = scaling.flag("use_gpu", false),
                    .threads_per_worker = scaling.number<int>("threads_per_worker"),
                    .virtual_workers = scaling.number<int>("virtual_workers")};
  const auto run = all.part("run_config");
  params.checkpoint = {.num_to_keep = run.number<int>("num_to_keep"),
                       .checkpoint_score_attribute = run.text("checkpoint_score_attribute", "")};
  const auto order = run.text("checkpoint_score_order", "max");
  if (order != "max" && order != "min") run.refuse(run.full("checkpoint_score_order"), "is neither max nor min");
  params.checkpoint.checkpoint_score_order = order == "max" ? ScoreOrder::max : ScoreOrder::min;
  params.max_failures = run.number<int>("max_failures").value_or(0);
  if (all.has("torch_config")) {
    const auto torch = all.part("torch_config");
    params.torch.backend = torch.text("backend", params.torch.backend);
    if (const auto timeout = torch.number<std::chrono::milliseconds::rep>("timeout_ms"))
      params.torch.timeout = std::chrono::milliseconds(*timeout);
  }
  if (all.has("dataset_config")) {
    const auto data = all.part("dataset_config");
    params.data.split_all = data.flag("split_all", false);
    const auto& names = data.at("datasets_to_split");
    if (!names.is_array()) data.refuse(data.full("datasets_to_split"), "is not a list");
    params.data.datasets_to_split.clear();
    for (const auto& name : names) {
      if (!name.is_string()) data.refuse(data.full("datasets_to_split"), "is not a list of names");
      params.data.datasets_to_split.push_back(name);
    }
  }
  return params;
}

Params read_params(const std::filesystem::path& folder) {
  const auto path = folder / "params.json";
  return params_from_json(read_json(path), path);
}

}  // namespace muster::detail::train
