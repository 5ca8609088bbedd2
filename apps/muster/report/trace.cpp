#include "trace.hpp"

#include <simdjson.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace muster::tool::report {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t most_traces = 3, most_spans = 40, most_ranks = 10;
/// Longer files are left out: the page only needs the sums at the end, but to find them all of the file is read.
constexpr std::uintmax_t most_bytes = std::uintmax_t{1} << 30;

/// Returns the trace files in the folder, the newest first.
std::vector<fs::path> trace_files(const fs::path& run) {
  std::vector<std::pair<fs::file_time_type, fs::path>> found;
  std::error_code error;
  for (fs::directory_iterator at(run, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    std::error_code ignored;
    if (name.starts_with("trace_") && name.ends_with(".json") && at->is_regular_file(ignored))
      found.emplace_back(at->last_write_time(ignored), at->path());
  }
  std::ranges::sort(found, std::greater());
  std::vector<fs::path> files;
  for (auto& [time, path] : found) files.push_back(std::move(path));
  if (files.size() > most_traces) files.resize(most_traces);
  return files;
}

/// Returns the `count` entries of the list with the largest numbers at `key`.
Json largest(const Json& list, const char* key, std::size_t count) {
  std::vector<Json> entries;
  for (const auto& entry : list)
    if (entry.is_object() && entry.value(key, Json()).is_number()) entries.push_back(entry);
  std::ranges::sort(entries, std::greater(), [&](const Json& entry) { return entry[key].get<double>(); });
  if (entries.size() > count) entries.resize(count);
  return entries;
}

/// Returns the sums of a trace; null if the file has none.
Json sums_of(const fs::path& file) {
  std::error_code ignored;
  if (fs::file_size(file, ignored) > most_bytes) return {};
  try {
    const simdjson::padded_string text = simdjson::padded_string::load(file.string());
    simdjson::ondemand::parser parser;
    auto document = parser.iterate(text);
    simdjson::ondemand::object sums = document["otherData"];
    return Json::parse(std::string_view(sums.raw_json()));
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace

Json traces_of(const fs::path& run) {
  Json traces = Json::array();
  for (const auto& file : trace_files(run)) {
    const auto sums = sums_of(file);
    if (!sums.is_object() || !sums.contains("spans")) continue;
    traces.push_back({{"file", file.filename().string()},
                      {"ranks", sums.value("ranks", Json())},
                      {"dropped_events", sums.value("dropped_events", Json())},
                      {"clock_error_ms", sums.value("clock_error_ms", Json())},
                      {"spans", largest(sums.at("spans"), "total_ms", most_spans)},
                      {"waited_for", largest(sums.value("waited_for", Json::array()), "ms", most_ranks)}});
  }
  return traces;
}

}  // namespace muster::tool::report
