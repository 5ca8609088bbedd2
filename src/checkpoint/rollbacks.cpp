#include "checkpoint/rollbacks.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/files/manifest.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <ranges>

namespace muster::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

fs::path file_of(const fs::path& run) { return run / "steps_back.json"; }

Json read_list(const fs::path& run) {
  const auto path = file_of(run);
  if (!fs::exists(status_of(path))) return Json::array();
  auto list = read_json(path);
  const auto has_index = [](const Json& rollback, const char* key) {
    return rollback.contains(key) && rollback.at(key).is_number_unsigned() &&
           rollback.at(key).get<std::uint64_t>() <= 999'999'999;
  };
  const auto has_ids = [](const Json& rollback) {
    const auto tiers = rollback.value("tiers", Json::array());
    return tiers.is_array() && std::ranges::all_of(tiers, [](const Json& id) { return id.is_string(); });
  };
  const auto is_rollback = [&](const Json& rollback) {
    return has_index(rollback, "to") && has_index(rollback, "over") && rollback.at("to") <= rollback.at("over") &&
           (!rollback.contains("name") || rollback.at("name").is_string()) && has_ids(rollback);
  };
  if (!list.is_array() || !std::ranges::all_of(list, is_rollback))
    throw Error(ExitCode::data, "reading " + path.string(), "it is not a list of rollbacks",
                "Repair it. If you remove it, the run goes on from its newest checkpoint, rolled back or not");
  return list;
}

}  // namespace

std::vector<Rollback> read_rollbacks(const fs::path& run) {
  std::vector<Rollback> rollbacks;
  for (const auto& rollback : read_list(run))
    rollbacks.push_back({rollback.at("to"), rollback.at("over"), rollback.value("name", ""),
                         rollback.value("tiers", std::vector<std::string>())});
  return rollbacks;
}

void add_rollback(const fs::path& run, const Rollback& rollback) {
  auto list = read_list(run);
  list.push_back({{"to", rollback.to},
                  {"over", rollback.last_index},
                  {"name", rollback.name},
                  {"tiers", rollback.tiers},
                  {"time", time_now()}});
  write_file(file_of(run), json_text(list, 2) + "\n");
}

bool is_rolled_back(const std::vector<Rollback>& rollbacks, int index) noexcept {
  // Goes from the newest rollback backwards. The run went on from the newer rollback's target, so an older rollback
  // counts only if it was made before that target existed.
  std::optional<int> target;
  for (const auto& rollback : rollbacks | std::views::reverse) {
    if (target && rollback.last_index >= *target) continue;
    if (index > rollback.last_index) return false;
    if (index > rollback.to) return true;
    target = rollback.to;
  }
  return false;
}

std::optional<std::pair<int, fs::path>> newest_not_rolled_back(const storage::Tier::Listing& there,
                                                               const std::vector<Rollback>& rollbacks) {
  for (const auto& [index, path] : there.published | std::views::reverse)
    if (!is_rolled_back(rollbacks, index)) return std::pair(index, path);
  return {};
}

}  // namespace muster::detail::checkpoint
