#include "run_record.hpp"

#include "../checkpoint_text.hpp"
#include "../run_files.hpp"
#include "pictures.hpp"
#include "rows.hpp"
#include "trace.hpp"

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

namespace muster::tool::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t max_error_bytes = 8192;
/// If the parameters are longer JSON than this, the page leaves them out.
constexpr std::size_t max_params_bytes = 200'000;
constexpr std::size_t most_starts = 1000;

std::string text_in(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(max_error_bytes, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())) && file.gcount() == 0) return {};
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

Json within_limit(Json value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace).size() > max_params_bytes ? Json("too long")
                                                                                              : value;
}

/// Returns the fields of status.json that the page shows.
Json status_for_page(const Json& status) {
  Json shown = Json::object();
  if (!status.is_object()) return shown;
  for (const char* key : {"epoch", "epochs", "global_step", "training_iteration", "world_size", "host", "pid",
                          "started", "updated", "error", "time", "starts"})
    if (const auto found = status.find(key); found != status.end()) shown[key] = *found;
  if (auto& starts = shown["starts"]; starts.is_array() && starts.size() > most_starts)
    starts.erase(starts.begin(), starts.end() - most_starts);
  return within_limit(shown);
}

/// Tells which checkpoints are rolled back, according to steps_back.json.
class RolledBack {
 public:
  explicit RolledBack(const fs::path& run) {
    const auto list = read_json(run / "steps_back.json");
    if (!list.is_array()) return;
    for (const auto& rollback : list)
      if (rollback.is_object() && rollback.value("to", Json()).is_number_integer() &&
          rollback.value("over", Json()).is_number_integer())
        rollbacks_.emplace_back(rollback.at("to"), rollback.at("over"));
  }

  bool contains(int index) const {
    std::optional<std::int64_t> target;  // target of the rollback that was made next
    for (auto rollback = rollbacks_.rbegin(); rollback != rollbacks_.rend(); ++rollback) {
      const auto [to, last] = *rollback;
      if (target && last >= *target) continue;
      if (index > last) return false;
      if (index > to) return true;
      target = to;
    }
    return false;
  }

 private:
  // For each rollback, its target and the highest index at the time.
  std::vector<std::pair<std::int64_t, std::int64_t>> rollbacks_ = {};
};

/// Returns what the page shows of a checkpoint that is in the run's folder.
Json kept_checkpoint(const CheckpointInfo& info, const RolledBack& rolled_back) {
  auto checkpoint = to_json(info, /*verified=*/false);
  return {{"folder", info.path.filename().string()},
          {"report", info.training_iteration},
          {"epoch", info.epoch},
          {"world_size", info.world_size},
          {"bytes", info.bytes},
          {"time", info.time},
          {"validation", checkpoint.at("validation")},
          {"problem", info.problem},
          {"state", !info.problem.empty()              ? (info.code == ExitCode::retry ? "not readable" : "damaged")
                    : rolled_back.contains(info.index) ? "given up"
                                                       : "kept"}};
}

Json checkpoints_for_page(const fs::path& run, const RunRows& rows) {
  const RolledBack rolled_back(run);
  std::map<std::string, Json> all;  // by name of the folder
  for (const auto& named : rows.checkpoints())
    all[named.folder] = {{"folder", named.folder}, {"report", named.position.report}, {"state", "deleted"}};
  for (const auto& info : list_checkpoints(run))
    all[info.path.filename().string()] = kept_checkpoint(info, rolled_back);
  for (const auto& named : rows.checkpoints()) {
    auto& checkpoint = all[named.folder];
    checkpoint.update({{"name", named.name},
                       {"step", named.position.step},
                       {"timestamp", named.timestamp},
                       {"save_s", named.save_s}});
  }
  Json list = Json::array();
  for (auto& [folder, checkpoint] : all) list.push_back(std::move(checkpoint));
  return list;
}

}  // namespace

Json read_run(const fs::path& run, const std::string& name, const Budget& budget) {
  RunRows rows;
  const auto counts = read_rows(run / "result.json", [&](const Row& row) { rows.add(row); });
  const auto status = read_json(run / "status.json");
  auto record = rows.to_json(budget);
  record["name"] = name;
  record["path"] = run.string();
  record["state"] = state_of(run, status);
  record["reports"] = counts.rows;
  record["damaged_lines"] = counts.damaged_lines;
  record["params"] = within_limit(read_json(run / "params.json"));
  record["status"] = status_for_page(status);
  record["error"] = text_in(run / "error.txt");
  record["checkpoints"] = checkpoints_for_page(run, rows);
  record["checkpoint_count"] = rows.checkpoint_count();
  record["traces"] = traces_of(run);
#ifdef MUSTER_HAS_TENSORBOARD
  record["pictures"] = pictures_of(run);
#endif
  return record;
}

Json read_sweep(const fs::path& sweep, const std::string& name) {
  const auto about = read_json(sweep / "sweep.json");
  Json record{{"name", name}, {"metric", ""}, {"mode", "max"}, {"trials", Json::array()}};
  if (!about.is_object()) return record;
  for (const char* key : {"metric", "mode", "program", "seed", "num_samples", "ranks_per_trial", "num_ranks"})
    if (about.contains(key)) record[key] = about.at(key);
  if (!about.contains("trials") || !about.at("trials").is_array()) return record;
  for (const auto& trial : about.at("trials")) {
    if (!trial.is_object()) continue;
    Json row = Json::object();
    for (const char* key : {"trial", "status", "config", "metrics", "error"}) row[key] = trial.value(key, Json());
    if (row.at("trial").is_string()) row["path"] = (sweep / row.at("trial").get<std::string>()).string();
    record["trials"].push_back(within_limit(std::move(row)));
  }
  return record;
}

std::vector<fs::path> trials_of(const fs::path& sweep) {
  std::vector<fs::path> trials;
  std::error_code error;
  for (fs::directory_iterator at(sweep, error), end; !error && at != end; at.increment(error))
    if (std::error_code ignored; at->path().filename().string().starts_with("trial_") &&
                                 fs::is_directory(at->path(), ignored) && is_run(at->path()))
      trials.push_back(at->path());
  if (error) throw Error(ExitCode::data, "reading " + sweep.string(), error.message(), "Check the permissions");
  std::ranges::sort(trials);
  return trials;
}

}  // namespace muster::tool::report
