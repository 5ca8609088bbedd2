#include "checkpoint/steps_back.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/manifest.hpp"
#include "muster/error.hpp"

#include <ranges>

namespace muster::detail::checkpoint {
namespace {

namespace fs = std::filesystem;

fs::path file_of(const fs::path& run) { return run / "steps_back.json"; }

Json read_list(const fs::path& run) {
  const auto path = file_of(run);
  if (!fs::exists(status_of(path))) return Json::array();
  auto list = read_json(path);
  const auto is_index = [](const Json& step, const char* key) {
    return step.contains(key) && step.at(key).is_number_unsigned() && step.at(key).get<std::uint64_t>() <= 999'999'999;
  };
  bool fits = list.is_array();
  for (std::size_t i = 0; fits && i < list.size(); ++i)
    fits = list[i].is_object() && is_index(list[i], "to") && is_index(list[i], "over") &&
           list[i].at("to") <= list[i].at("over");
  if (!fits)
    throw Error(ExitCode::data, "reading " + path.string(), "it is not a list of steps back",
                "Mend it; without it the run goes on from its newest checkpoint, given up or not");
  return list;
}

}  // namespace

std::vector<StepBack> read_steps_back(const fs::path& run) {
  std::vector<StepBack> steps;
  for (const auto& step : read_list(run)) steps.push_back({step.at("to"), step.at("over")});
  return steps;
}

void add_step_back(const fs::path& run, const StepBack& step) {
  auto list = read_list(run);
  list.push_back({{"to", step.to}, {"over", step.over}, {"time", time_now()}});
  write_file(file_of(run), list.dump(2) + "\n");
}

bool given_up(const std::vector<StepBack>& steps, int index) noexcept {
  // From the newest step back to those before the checkpoint to which it went.
  std::optional<int> went_to;
  for (const auto& step : steps | std::views::reverse) {
    if (went_to && step.over >= *went_to) continue;
    if (index > step.over) return false;
    if (index > step.to) return true;
    went_to = step.to;
  }
  return false;
}

std::optional<std::pair<int, fs::path>> newest_of(const Found& found, const std::vector<StepBack>& steps) {
  for (const auto& [index, path] : found.published | std::views::reverse)
    if (!given_up(steps, index)) return std::pair(index, path);
  return {};
}

}  // namespace muster::detail::checkpoint
