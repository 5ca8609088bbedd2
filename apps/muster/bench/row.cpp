#include "row.hpp"

#include "../text.hpp"
#include "base/text.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>

namespace muster::bench {
namespace {

const std::vector<double>& times_of(const Timings& timings, const std::string& candidate) {
  const auto found = std::find(timings.candidates.begin(), timings.candidates.end(), candidate);
  return timings.ms.at(static_cast<std::size_t>(found - timings.candidates.begin()));
}

std::vector<double> ratios(const std::vector<double>& mine, const std::vector<double>& theirs) {
  std::vector<double> result(std::min(mine.size(), theirs.size()));
  std::transform(mine.begin(), mine.begin() + static_cast<std::ptrdiff_t>(result.size()), theirs.begin(),
                 result.begin(), std::divides<>());
  return result;
}

/// Returns the number as "123", "12.3", "1.23", "0.12" or "0.012".
std::string rounded_text(double value) {
  return detail::formatted(value >= 100 ? "%.0f" : value >= 10 ? "%.1f" : value >= 0.1 ? "%.2f" : "%.3f", value);
}

std::string time_text(double ms) {
  if (std::isnan(ms)) return "–";
  return ms >= 1 ? rounded_text(ms) + " ms" : rounded_text(1000 * ms) + " µs";
}

std::string rounds_text(int rounds) { return detail::counted(rounds, "round"); }

/// Returns the interval as text, or why there is none.
std::string interval_text(const Comparison& comparison) {
  constexpr int least = 5;  // with fewer rounds, an interval means nothing
  if (comparison.rounds < least) return comparison.rounds > 0 ? rounds_text(comparison.rounds) : "failed";
  return rounded_text(comparison.interval.low) + " – " + rounded_text(comparison.interval.high);
}

}  // namespace

Row make_row(std::string name, const Timings& timings) {
  Row row;
  row.name = std::move(name);
  row.rounds = static_cast<int>(times_of(timings, ours).size());
  row.median_ms.emplace_back(ours, median(times_of(timings, ours)));
  row.twin_ratio = median(ratios(times_of(timings, ours), times_of(timings, twin)));
  add_peers(row, timings);
  return row;
}

void add_peers(Row& row, const Timings& timings) {
  for (const auto& candidate : timings.candidates) {
    if (candidate == ours || candidate == twin) continue;
    const auto compared = ratios(times_of(timings, ours), times_of(timings, candidate));
    row.median_ms.emplace_back(candidate, median(times_of(timings, candidate)));
    row.comparisons.push_back(
        {candidate, median(compared), bootstrap_interval(compared), static_cast<int>(compared.size())});
  }
}

void to_json(nlohmann::ordered_json& json, const Row& row) {
  auto median_ms = nlohmann::ordered_json::object(), ratio = median_ms, interval = median_ms, peer_rounds = median_ms;
  for (const auto& [candidate, ms] : row.median_ms) median_ms[candidate] = ms;
  for (const auto& comparison : row.comparisons) {
    ratio[comparison.peer] = comparison.ratio;  // JSON has null for NaN
    interval[comparison.peer] = {comparison.interval.low, comparison.interval.high};
    if (comparison.rounds != row.rounds) peer_rounds[comparison.peer] = comparison.rounds;
  }
  json = {{"case", row.name},     {"median_ms", median_ms}, {"ratio", ratio},      {"interval", interval},
          {"aa", row.twin_ratio}, {"rounds", row.rounds},   {"void", !row.valid()}};
  if (!peer_rounds.empty()) json["peer_rounds"] = peer_rounds;
  if (row.pass)
    json["pass"] = {{"samples", row.pass->samples},
                    {"batch", row.pass->batch},
                    {"samples_per_s", row.pass->samples_per_s},
                    {"samples_per_s_range", {row.pass->slowest, row.pass->fastest}},
                    {"bytes_per_s", row.pass->bytes_per_s},
                    {"first_batch_ms", row.pass->first_batch_ms},
                    {"waiting", row.pass->waiting}};
  if (!row.notes.empty()) json["notes"] = row.notes;
}

void add_details(Row& row, const nlohmann::ordered_json& json) {
  row.notes = json.value("notes", row.notes);
  if (!json.contains("pass")) return;
  const auto& pass = json.at("pass");
  const auto& range = pass.at("samples_per_s_range");
  row.pass = {pass.at("samples"), pass.at("batch"),       pass.at("samples_per_s"),  range.at(0),
              range.at(1),        pass.at("bytes_per_s"), pass.at("first_batch_ms"), pass.at("waiting")};
}

std::string pass_text(const Row& row) {
  const auto& pass = row.pass.value();
  const auto whole = [](double value) { return std::to_string(static_cast<std::int64_t>(value)); };
  return row.name + ": " + whole(pass.samples_per_s) + " samples/s (" + whole(pass.slowest) + " – " +
         whole(pass.fastest) + "), " + tool::bytes_text(static_cast<std::uint64_t>(pass.bytes_per_s)) +
         " per second; the first batch takes " + time_text(pass.first_batch_ms) +
         "; a step that computes as long as reading a batch takes waits " +
         detail::formatted("%.0f", 100 * pass.waiting) + " % of its time";
}

std::string row_text(const Row& row, bool first) {
  // Each row is printed as a table of its own, so its columns have least widths. Only a longer name shifts its columns.
  tool::Table table{
      {{"case", false, 15}, {"candidate", false, 16}, {"time", true, 8}, {"muster / it", true}, {"95% interval"}}, {}};
  for (const auto& [candidate, ms] : row.median_ms) {
    std::vector<std::string> cells{candidate == ours ? row.name : "", candidate, time_text(ms), "", ""};
    for (const auto& comparison : row.comparisons)
      if (comparison.peer == candidate) {
        cells[3] = std::isnan(comparison.ratio) ? "–" : rounded_text(comparison.ratio);
        cells[4] = interval_text(comparison);
      }
    table.rows.push_back(std::move(cells));
  }
  table.rows.push_back(
      {"", "A/A", "", detail::formatted("%.3f", row.twin_ratio), row.valid() ? rounds_text(row.rounds) : "void"});
  return tool::to_text(table, first);
}

RowWriter::~RowWriter() {
  if (json_)
    std::cout << (first_ ? "[]" : "\n]") << std::endl;
  else
    for (const auto* lines : {&passes_, &notes_})
      for (const auto& line : *lines) std::cout << (&line == &lines->front() ? "\n" : "") << tool::bullet(line);
  std::cout << std::flush;
}

void RowWriter::write(const Row& row) {
  if (json_)
    std::cout << (first_ ? "[\n" : ",\n") << nlohmann::ordered_json(row).dump(2) << std::flush;
  else
    std::cout << row_text(row, first_) << std::flush;
  first_ = false;
  if (row.pass) passes_.push_back(pass_text(row));
  for (const auto& note : row.notes)
    if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(note);
}

}  // namespace muster::bench
