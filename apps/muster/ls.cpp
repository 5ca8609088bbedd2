// muster ls: lists the runs in a storage folder.
#include "batch/script.hpp"
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "run_files.hpp"
#include "text.hpp"

#include <muster/error.hpp>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::tool {
namespace {

/// Returns the summary of a folder that is a run; none for other folders. A folder that cannot be read, as another
/// user's run may be, has the state "not readable", so that the other runs are still listed.
std::optional<RunSummary> summary_if_run(const std::filesystem::path& folder) {
  std::error_code ignored;
  try {
    if (std::filesystem::is_directory(folder, ignored) && !is_checkpoint(folder) && is_run(folder))
      return summary_of(folder);
  } catch (const std::exception&) {
    if (std::filesystem::exists(folder, ignored)) return RunSummary{.path = folder, .state = "not readable"};
  }
  return {};  // not a run, or removed meanwhile
}

void list(const std::filesystem::path& storage, bool json) {
  if (!is_folder(storage))
    throw Error(ExitCode::data, "opening " + storage.string(), "there is no such folder",
                "Name the folder that programs were given with --storage; it is runs by default");
  std::vector<RunSummary> runs;
  std::error_code error;
  std::filesystem::path sweep;  // any sweep in the folder, for the hint below
  for (std::filesystem::directory_iterator at(storage, error), end; !error && at != end; at.increment(error)) {
    if (auto run = summary_if_run(at->path())) runs.push_back(std::move(*run));
    if (is_sweep(at->path())) sweep = at->path();
  }
  if (error) throw Error(ExitCode::data, "reading " + storage.string(), error.message(), "Check the permissions");
  std::ranges::sort(runs, [](const RunSummary& one, const RunSummary& other) {
    return std::pair(-one.updated, one.path) < std::pair(-other.updated, other.path);
  });
  if (json) {
    Json rows = Json::array();
    for (const auto& run : runs) rows.push_back(to_json(run));
    return print_json(rows);
  }
  const auto tell_of_sweeps = [&] {
    if (!sweep.empty())
      std::cout << "there are sweeps; `muster ls " << printable(shell_word(sweep.string()))
                << "` lists the trials of one\n";
  };
  if (runs.empty()) {
    std::cout << "no runs\n";
    return tell_of_sweeps();
  }
  Table table{{{"state"}, {"epoch", true}, {"reports", true}, {"last sign", true}, {"metric"}, {"run"}}, {}};
  for (const auto& run : runs)
    table.rows.push_back({run.state, run.epoch, std::to_string(run.reports), age_text(run.updated), run.best,
                          run.path.filename().string()});
  std::cout << to_text(table);
  tell_of_sweeps();
}

}  // namespace

void add_ls(CLI::App& app) {
  struct Arguments {
    std::filesystem::path storage = default_storage();
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("ls", "List the runs of a storage, the last active one first");
  command->add_option("storage", arguments->storage, "The folder of the runs [runs, or MUSTER_STORAGE]")
      ->option_text("[STORAGE]");
  command->add_flag("--json", arguments->json, "Print it as JSON");
  command->footer("Example:\n  muster ls\n  muster ls /scratch/runs --json");
  command->callback([arguments] { list(arguments->storage, arguments->json); });
}

}  // namespace muster::tool
