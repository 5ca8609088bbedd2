#include "write.hpp"

#include "../checkpoint_text.hpp"
#include "../replace_file.hpp"
#include "../text.hpp"
#include "page.hpp"
#include "run_record.hpp"

#include <muster/error.hpp>
#include <muster/version.hpp>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iostream>
#include <set>
#include <string>
#include <string_view>

namespace muster::tool::report {
namespace {

namespace fs = std::filesystem;

/// Up to this many runs have the full number of points on a page; if there are more runs, each has fewer points.
constexpr std::size_t full_runs = 16;

[[noreturn]] void refuse_output(const fs::path& output, const std::string& fact) {
  throw Error(ExitCode::usage, "writing " + output.string(), fact, "Choose another file with -o");
}

bool begins_as_report(const fs::path& file) {
  const std::string_view begin = page_begin;
  std::string have(begin.size(), '\0');
  std::ifstream(file, std::ios::binary).read(have.data(), static_cast<std::streamsize>(have.size()));
  return have == begin;
}

/// Throws an Error if `output` cannot be written. It may be an older report, and it may be in a run's folder under the
/// usual name of a report.
void check_output(const fs::path& output) {
  if (output.empty()) refuse_output(output, "it has no name");
  std::error_code error;
  const auto status = fs::status(output, error);
  if (fs::is_directory(status)) refuse_output(output, "it is a folder");
  if (fs::exists(status) && !fs::is_regular_file(status)) refuse_output(output, "it is no regular file");
  if (fs::exists(status) && fs::file_size(output, error) > 0 && !begins_as_report(output))
    refuse_output(output, "there is a file that is not a report of muster");
  const auto folder = output.has_parent_path() ? output.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) refuse_output(output, "there is no folder " + folder.string());
  const bool is_beside_run = output.filename() == "report.html" && !is_checkpoint(fs::absolute(folder));
  require_outside_records(is_beside_run ? fs::weakly_canonical(folder) : output);
}

/// Returns a name for each folder on the command line: as many of its last parts as are needed to tell the folders
/// apart.
std::vector<std::string> short_names(const std::vector<fs::path>& folders) {
  std::vector<std::string> names;
  for (std::size_t parts = 1; parts < 8; ++parts) {
    names.clear();
    for (const auto& folder : folders) {
      auto whole = fs::absolute(folder).lexically_normal();
      if (!whole.has_filename()) whole = whole.parent_path();
      std::vector<std::string> all(whole.begin(), whole.end());
      fs::path name;
      for (auto part = all.end() - static_cast<std::ptrdiff_t>(std::min(parts, all.size())); part != all.end(); ++part)
        name /= *part;
      names.push_back(name.string());
    }
    if (std::set(names.begin(), names.end()).size() == names.size()) break;
  }
  return names;
}

struct Inputs {
  std::vector<fs::path> runs = {}, sweeps = {};
};

Inputs sorted_inputs(const std::vector<fs::path>& folders) {
  Inputs inputs;
  const auto add = [](std::vector<fs::path>& to, const fs::path& folder) {
    if (std::ranges::none_of(to, [&](const fs::path& there) { return fs::equivalent(there, folder); }))
      to.push_back(folder);
  };
  for (const auto& folder : folders) {
    const auto doing = "reporting on " + folder.string();
    if (!is_folder(folder)) throw Error(ExitCode::data, doing, "there is no such folder", "`muster ls` lists runs");
    const bool has_run = !is_checkpoint(folder) && is_run(folder);
    if (is_sweep(folder)) {
      add(inputs.sweeps, folder);
      for (const auto& trial : trials_of(folder)) add(inputs.runs, trial);
    } else if (!has_run) {
      throw Error(ExitCode::data, doing, "it is neither a run nor a sweep", "Name the folder of one, as in runs/demo");
    }
    if (has_run) add(inputs.runs, folder);
  }
  return inputs;
}

Budget budget_for(std::size_t run_count) {
  Budget budget;
  const auto part = std::max<std::size_t>(run_count, full_runs);
  budget.metric_buckets = budget.metric_buckets * full_runs / part;
  budget.other_buckets = budget.other_buckets * full_runs / part;
  return budget;
}

}  // namespace

void write_report(const std::vector<fs::path>& folders, const fs::path& output) {
  if (output != "-") check_output(output);
  const auto inputs = sorted_inputs(folders);
  Json data{{"version", MUSTER_VERSION},
            {"made", static_cast<std::int64_t>(std::time(nullptr))},
            {"runs", Json::array()},
            {"sweeps", Json::array()}};
  const auto run_names = short_names(inputs.runs), sweep_names = short_names(inputs.sweeps);
  for (std::size_t i = 0; i < inputs.runs.size(); ++i)
    data["runs"].push_back(read_run(inputs.runs[i], run_names[i], budget_for(inputs.runs.size())));
  for (std::size_t i = 0; i < inputs.sweeps.size(); ++i)
    data["sweeps"].push_back(read_sweep(inputs.sweeps[i], sweep_names[i]));
  const auto page = page_of(data);
  if (output == "-") {
    std::cout << page;
    return;
  }
  replace_file(output, page);
  const auto count = inputs.runs.size();
  std::cout << printable(output.string()) << ": " << count << (count == 1 ? " run, " : " runs, ")
            << bytes_text(page.size()) << "\n";
}

}  // namespace muster::tool::report
