#include "sweep/table.hpp"

#include "base/json.hpp"
#include "base/printable.hpp"
#include "base/readable.hpp"
#include "sweep/asha.hpp"
#include "sweep/folder.hpp"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace muster::detail::sweep {
namespace {

std::string text_of_value(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_number_float()) return json_text_lossy(value);
  return number_text(value.get<double>());
}

std::string metric_of(const Trial& trial, const std::string& name) {
  if (!trial.metrics.is_object() || !trial.metrics.contains(name)) return "";
  return text_of_value(trial.metrics.at(name));
}

/// Returns the trials in order: the best first, and those that have not ended well last.
std::vector<const Trial*> ranked(const SweepResult& sweep) {
  const auto rank_of = [&](const Trial& trial) {
    const double worst = -std::numeric_limits<double>::infinity();
    return std::pair(has_ended_well(trial.status), score_of(trial.metrics, sweep.metric, sweep.mode).value_or(worst));
  };
  std::vector<const Trial*> trials;
  for (const auto& trial : sweep.trials) trials.push_back(&trial);
  std::ranges::stable_sort(trials, [&](const auto* a, const auto* b) { return rank_of(*a) > rank_of(*b); });
  return trials;
}

}  // namespace

std::string one_line(const Trial& trial, const std::string& metric) {
  std::string text;
  for (const auto& [name, value] : settings_of(trial.config))
    text += (text.empty() ? " (" : ", ") + name + " " + text_of_value(value);
  text = trial.name + text + (text.empty() ? ": " : "): ") + text_of(trial.status);
  if (trial.error) return text + ": " + trial.error->what();
  if (const auto value = metric_of(trial, metric); !value.empty()) text += ", " + metric + " " + value;
  if (const auto report = metric_of(trial, "training_iteration"); !report.empty()) text += " at report " + report;
  return text;
}

std::string table_of(const SweepResult& sweep, std::size_t width, std::size_t most) {
  constexpr std::size_t widest_setting = 24;
  const auto all = ranked(sweep);
  const std::vector shown(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(std::min(most, all.size())));
  std::vector<std::vector<std::string>> columns{{"trial"}, {"status"}, {"report"}};
  for (const auto* trial : shown) {
    columns[0].push_back(trial->name);
    columns[1].push_back(trial->status == TrialStatus::stopped ? "stopped" : text_of(trial->status));
    columns[2].push_back(metric_of(*trial, "training_iteration"));
  }
  if (!sweep.metric.empty()) {
    auto& column = columns.emplace_back(1, shortened(sweep.metric, widest_setting));
    for (const auto* trial : shown) column.push_back(metric_of(*trial, sweep.metric));
  }
  std::vector<Settings> settings;
  std::vector<std::string> names;  // all names; if the space chooses whole objects, a trial may lack some
  for (const auto* trial : shown)
    for (const auto& [name, value] : settings.emplace_back(settings_of(trial->config)))
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  for (const auto& name : names) {
    auto& column = columns.emplace_back(1, shortened(name, widest_setting));
    for (const auto& of_trial : settings) {
      const auto found = std::ranges::find(of_trial, name, &Settings::value_type::first);
      column.push_back(found == of_trial.end() ? "" : shortened(text_of_value(found->second), widest_setting));
    }
  }

  std::vector<std::string> lines(shown.size() + 1);
  std::size_t used = 0;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const auto& column = columns[c];
    std::size_t wide = 0;
    for (const auto& cell : column) wide = std::max(wide, character_count(cell));
    const bool last = c + 1 == columns.size();
    const std::size_t gap = c == 0 ? 0 : 2;
    if (used + gap + wide + (last ? 0 : 3) > width) {  // leaves room for the dots
      for (auto& line : lines) line += "  …";
      break;
    }
    used += gap + wide;
    for (std::size_t r = 0; r < lines.size(); ++r) {
      const std::string space(wide - character_count(column[r]), ' ');
      lines[r] += std::string(gap, ' ') + (c < 2 ? column[r] + space : space + column[r]);
    }
  }
  std::string text;
  for (auto& line : lines) text += line.erase(line.find_last_not_of(' ') + 1) + "\n";
  if (all.size() > shown.size()) text += str("and ", all.size() - shown.size(), " more in sweep.csv\n");
  if (const auto best = sweep.best()) text += shortened("best: " + one_line(*best, sweep.metric), width) + "\n";
  return text;
}

}  // namespace muster::detail::sweep
