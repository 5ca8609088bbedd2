// muster slurm and muster pbs: write a batch script that trains.
#include "../checkpoint_text.hpp"
#include "../commands.hpp"
#include "../replace_file.hpp"
#include "../run_files.hpp"
#include "../text.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "script.hpp"

#include <muster/error.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string_view>
#include <system_error>

namespace muster::tool {
namespace {

namespace fs = std::filesystem;

/// Returns "muster" if the shell finds this program under that name, otherwise this program's path.
std::string own_name() {
  std::error_code error;
  const auto self = fs::canonical("/proc/self/exe", error);
  const auto found = detail::find_program("muster");
  return !found.empty() && fs::equivalent(found, self, error) ? "muster" : self.string();
}

/// Returns how long the longest save of a run has taken, rounded up. None if that is unknown: with asynchronous saves
/// or a fast tier, the rows only have the time for which the ranks had to wait.
std::optional<std::chrono::seconds> longest_save_of(const fs::path& run) {
  const auto params = read_json(run / "params.json");
  const auto config = params.is_object() ? params.value("run_config", Json()) : Json();
  if (!config.is_object() || config.value("async_save", Json()) == true || config.value("fast_tier", Json("")) != "")
    return {};
  double longest = 0;
  const auto save = Json::json_pointer("/rank_times/save/max");
  for (const auto& row : Reports(run).read_new())
    if (row.contains(save) && row.at(save).is_number()) longest = std::max(longest, row.at(save).get<double>());
  if (!(longest > 0 && longest < 1e5)) return {};
  return std::chrono::seconds(static_cast<int>(std::ceil(longest)));
}

/// Throws an Error if `name` is no folder name: the program would refuse it, but only after waiting in the queue.
void require_folder_name(const std::string& name) {
  const auto is_refused = [](unsigned char c) { return c < 0x20 || c == '/' || c == 0x7f; };
  if (std::string_view(".- ").find(name.front()) != std::string_view::npos || std::ranges::any_of(name, is_refused))
    throw Error(ExitCode::usage, "writing a batch script for the run \"" + printable(name) + "\"",
                "it is not the name of a folder: no '/', no leading '.', '-' or space, no control characters",
                "Choose another --name; --storage says where the run lies");
  if (name.starts_with("checkpoint_"))
    throw Error(ExitCode::usage, "writing a batch script for the run \"" + name + "\"",
                "names that begin with checkpoint_ are those of checkpoints", "Choose another --name");
}

void complete(BatchOptions& options) {
  if (options.command.front().empty() || options.command.front().starts_with("-"))
    throw Error(ExitCode::usage, "writing a batch script", "no program is named",
                "Write it behind --, as in -- ./fit --name demo");
  options.written_by += " --";
  for (const auto& word : options.command) options.written_by += " " + shell_word(word);
  options.tool = own_name();
  const auto& command = options.command;
  const auto name = flag_in(command, "--name").value_or(options.name);
  const auto storage =
      flag_in(command, "--storage").value_or(options.storage.empty() ? default_storage() : options.storage);
  if (storage == "~" || storage.starts_with("~/"))
    throw Error(ExitCode::usage, "writing a batch script for the storage " + storage,
                "the shell has not replaced the ~", "Leave the ~ out of quotes, or write $HOME");
  if (name.empty()) return;
  require_folder_name(name);
  options.longest_save = longest_save_of(fs::path(storage) / name);
}

void write(const std::string& text, const std::string& file, bool force) {
  if (file.empty()) {
    std::cout << text;
    return;
  }
  std::error_code error;
  if (!force && fs::exists(fs::symlink_status(file, error)))
    throw Error(ExitCode::usage, "writing " + file, "it exists", "Choose another file, or replace it with --force");
  const auto status = fs::status(file, error);
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw Error(ExitCode::usage, "writing " + file, "it is no regular file", "Choose another file");
  const auto folder = fs::path(file).has_parent_path() ? fs::path(file).parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error))
    throw Error(ExitCode::usage, "writing " + file, "there is no folder " + folder.string(),
                "Make it, or choose another");
  require_outside_records(file);
  replace_file(file, text);
}

CLI::Validator batch_time(std::chrono::seconds& time) {
  const auto check = [&time](std::string& text) -> std::string {
    const auto parsed = parse_time(text);
    if (!parsed) return "\"" + text + "\" is no time such as 30 (minutes), 30:00, 12:00:00 or 1-12";
    time = *parsed;
    return {};
  };
  return {check, ""};
}

/// Accepts words that need no quotes after an option in a line of a batch script such as "#SBATCH --partition=WORD".
CLI::Validator plain_word() {
  const auto check = [](std::string& text) -> std::string {
    if (!text.empty() && text == shell_word(text) && text.front() != '-') return {};
    return "\"" + text + "\" is not a name that a batch script can have";
  };
  return {check, ""};
}

struct BatchSystem {
  const char *command, *title, *submit, *queue_flag, *queue;
  std::string (*script)(const BatchOptions& options);
};

void add(CLI::App& app, const BatchSystem& system) {
  struct Asked {
    BatchOptions options;
    std::string time, file;
    bool force = false;
  };
  auto* command = app.add_subcommand(system.command, detail::str("Write a batch script for ", system.title));
  const auto asked = std::make_shared<Asked>();
  auto& options = asked->options;
  constexpr std::uint64_t most = 1'000'000;
  command->add_option("--nodes", options.nodes, "Nodes [1]")->transform(whole_number(1, most))->option_text("N");
  command->add_option("--time", asked->time, "Time limit: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM [1:00:00]")
      ->check(batch_time(options.time))
      ->option_text("T");
  command->add_option("--gpus", options.gpus, "GPUs of each node [0]")
      ->transform(whole_number(0, most))
      ->option_text("G");
  command->add_option("--ranks-per-node", options.ranks_per_node, "Ranks on each node [one for each GPU, else 2]")
      ->transform(whole_number(1, most))
      ->option_text("R");
  command->add_option("--cpus-per-rank", options.cpus_per_rank, "Cores for each rank [1]")
      ->transform(whole_number(1, most))
      ->option_text("C");
  command->add_option("--name", options.name, "Name of the job and of the run [the program's]")->option_text("NAME");
  command->add_option("--storage", options.storage, "Folder of the runs [runs]")->option_text("DIR");
  command->add_option(system.queue_flag, options.queue, system.queue)->check(plain_word())->option_text("NAME");
  command->add_option("--account", options.account, "Account that is charged")
      ->check(plain_word())
      ->option_text("NAME");
  command->add_option("--chain", options.chain, "Jobs that go on one after the other, where a job is not requeued")
      ->transform(whole_number(2, most))
      ->option_text("N");
  command->add_option("-o,--output", asked->file, "Write a new file [standard output]")->option_text("FILE");
  command->add_flag("--force", asked->force, "Replace the file");
  command->add_option("command", options.command, "The program and its arguments")
      ->required()
      ->option_text("-- PROGRAM ARGS...");
  const std::string example = detail::str("muster ", system.command, " --nodes 2 --time 12:00:00 -o train.",
                                          system.submit, " -- ./fit --name demo");
  command->footer("Example:\n  " + example + "\n  " + system.submit + " train." + system.submit);
  command->callback([command, asked, system] {
    auto& options = asked->options;
    options.written_by = detail::str("muster ", system.command);
    for (const auto* option : command->parse_order())
      if (const auto& name = option->get_lnames(); !name.empty() && name.front() != "output" && name.front() != "force")
        options.written_by += " --" + name.front() + " " + shell_word(option->results().back());
    complete(options);
    write(system.script(options), asked->file, asked->force);
  });
}

}  // namespace

void add_batch(CLI::App& app) {
  add(app, {"slurm", "Slurm", "sbatch", "--partition", "Partition [the cluster's default]", slurm_script});
  add(app, {"pbs", "PBS", "qsub", "--partition,--queue", "Queue [the server's default]", pbs_script});
}

}  // namespace muster::tool
