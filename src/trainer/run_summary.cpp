#include "trainer/run_summary.hpp"

#include "base/json.hpp"
#include "base/printable.hpp"
#include "base/readable.hpp"
#include "base/row_fields.hpp"
#include "base/text.hpp"
#include "muster/checkpoint.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

namespace muster::detail::trainer {
namespace {

constexpr std::size_t most_metrics = 12;
constexpr std::size_t name_width = 26;

/// Returns "2:05" or "1:00:05"; below ten seconds "0.4 s".
std::string duration(double seconds) {
  if (seconds < 9.95) return formatted("%.1f s", seconds);
  return clock_text(std::llround(seconds));
}

/// The values of a metric in the reports of a run.
struct Stats {
  double last = std::numeric_limits<double>::quiet_NaN();
  double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
  std::int64_t lowest_at = 0, highest_at = 0;  ///< numbers of the reports that have these values

  void add(const Json& value, std::int64_t report) {
    last = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (last < lowest) lowest = last, lowest_at = report;
    if (last > highest) highest = last, highest_at = report;
  }
  bool has_numbers() const { return lowest_at > 0; }
};

std::map<std::string, Stats> stats_of(const std::vector<Json>& rows) {
  std::map<std::string, Stats> values;
  std::int64_t number = 0;
  for (const auto& row : rows) {
    ++number;
    const auto report = static_cast<std::int64_t>(number_at(row, "training_iteration"));
    for (const auto& [name, value] : row.items())
      if (!is_row_field(name) && (value.is_number() || value.is_null()))
        values[name].add(value, report > 0 ? report : number);
  }
  std::erase_if(values, [](const auto& entry) { return !entry.second.has_numbers(); });
  return values;
}

/// Makes a name from the program printable on one line.
std::string printable_line(const std::string& name) {
  auto text = printable(name);
  std::ranges::replace_if(
      text, [](char byte) { return byte == '\n' || byte == '\t'; }, ' ');
  return text;
}

/// Returns a name from the program in exactly `name_width` columns.
std::string column_of(const std::string& name) {
  const auto text = shortened(printable_line(name), name_width);
  return text + std::string(name_width - character_count(text), ' ');
}

std::string metric_lines(const std::vector<Json>& rows) {
  const auto values = stats_of(rows);
  if (values.empty()) return {};
  std::string text = formatted("  %-*s %10s %18s %18s\n", static_cast<int>(name_width), "metric", "last",
                               "lowest (report)", "highest (report)");
  const auto with_report = [](double value, std::int64_t report) { return str(number_text(value), " (", report, ")"); };
  std::size_t shown = 0;
  for (const auto& [name, of] : values) {
    if (shown++ == most_metrics) break;
    text += "  " + column_of(name) + " " +
            formatted("%10.4g %18s %18s\n", of.last, with_report(of.lowest, of.lowest_at).c_str(),
                      with_report(of.highest, of.highest_at).c_str());
  }
  if (values.size() > most_metrics) text += "  and " + counted(values.size() - most_metrics, "more metric") + "\n";
  return text;
}

/// Returns "time: 93% useful, 4% data": the useful part and the causes of the rest. Parts below half a percent are left
/// out.
std::string time_line(const Json& time) {
  const double training = number_at(time, "training_s"), total = training + number_at(time, "starting_s");
  if (total <= 0) return {};
  std::vector<std::pair<double, const char*>> causes{{number_at(time, "data_s"), "data"},
                                                     {number_at(time, "saves_s"), "saves"},
                                                     {number_at(time, "late_s"), "late"},
                                                     {number_at(time, "repeated_s"), "repeated"}};
  double useful = training;
  for (const auto& cause : causes) useful -= cause.first;
  causes.emplace_back(number_at(time, "starting_s"), "starting");
  std::ranges::stable_sort(causes, std::greater(), &std::pair<double, const char*>::first);
  std::string text = formatted("  time: %.0f%% useful", 100 * std::max(useful, 0.0) / total);
  for (const auto& [seconds, cause] : causes)
    if (const double percent = 100 * seconds / total; percent >= 0.5) text += formatted(", %.0f%% %s", percent, cause);
  return text + "\n";
}

/// Returns the samples per second over all reports; 0 if no report has counted samples.
double samples_per_second(const std::vector<Json>& rows) {
  double samples = 0, seconds = 0;
  for (const auto& row : rows) {
    samples += number_at(row, "num_samples");
    seconds += number_at(row, "time_this_iter_s");
  }
  return seconds > 0 ? samples / seconds : 0;
}

/// Returns "3 checkpoints: the newest is checkpoint_000003,\n  the best checkpoint_000001 (loss 0.029)".
std::string checkpoint_line(const Result& result, const CheckpointConfig& config) {
  if (result.best_checkpoints.empty() || !result.checkpoint) return {};
  const auto name_of = [](const Checkpoint& checkpoint) { return checkpoint.path().filename().string(); };
  auto text =
      "  " + counted(result.best_checkpoints.size(), "checkpoint") + ": the newest is " + name_of(*result.checkpoint);
  const auto& [best, metrics] = result.best_checkpoints.front();
  const auto& score = config.checkpoint_score_attribute;
  if (score.empty() || !metrics.is_object() || !metrics.contains(score) || !metrics.at(score).is_number())
    return text + "\n";
  return text + ",\n  the best " + name_of(best) + " (" + shortened(printable_line(score), name_width) + " " +
         number_text(metrics.at(score).get<double>()) + ")\n";
}

}  // namespace

std::string run_summary(const Result& result, const CheckpointConfig& config, const Json& status) {
  const auto& rows = result.metrics_history;
  if (rows.empty()) return {};
  const auto& last = rows.back();
  const auto time = status.is_object() ? status.value("time", Json()) : Json();
  const double seconds = number_at(time, "training_s") + number_at(time, "starting_s");
  const auto steps = static_cast<std::int64_t>(number_at(last, "global_step"));
  std::string text = !result.error                               ? "finished: "
                     : result.error->code() == ExitCode::stopped ? "stopped: "
                                                                 : "failed: ";
  text += counted(rows.size(), "report");
  if (steps > 0) text += ", " + counted(steps, "step");
  if (const auto ranks = static_cast<std::int64_t>(number_at(last, "world_size")); ranks > 0)
    text += ", " + counted(ranks, "rank");
  if (seconds > 0) text += ", " + duration(seconds);
  text += "\n" + metric_lines(rows);
  if (const double speed = samples_per_second(rows); speed > 0) text += "  " + number_text(speed) + " samples/s\n";
  text += time_line(time) + checkpoint_line(result, config);
  return text + "  " + printable(result.path.string()) + "\n";
}

}  // namespace muster::detail::trainer
