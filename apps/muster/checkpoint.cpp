// muster checkpoint: lists, verifies and exports the checkpoints of a run.
#include "base/text.hpp"
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "text.hpp"

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>

#include <algorithm>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace muster::tool {
namespace {

struct CheckpointArguments {
  std::filesystem::path path;
  bool json = false;
};

void print(const std::vector<CheckpointInfo>& checkpoints, bool verified, bool json) {
  if (json) {
    Json rows = Json::array();
    for (const auto& info : checkpoints) rows.push_back(to_json(info, verified));
    print_json(rows);
  } else if (checkpoints.empty()) {
    std::cout << "no checkpoints\n";
  } else {
    std::cout << checkpoints_text(checkpoints, verified);
  }
}

void require_folder(const std::filesystem::path& path) {
  if (!is_folder(path))
    throw Error(ExitCode::data, "opening " + path.string(), "there is no such folder",
                "Name a run's folder, as in runs/demo");
}

void list(const CheckpointArguments& arguments) {
  require_folder(arguments.path);
  print(checkpoints_of(arguments.path), /*verified=*/false, arguments.json);
}

void verify(const CheckpointArguments& arguments) {
  require_folder(arguments.path);
  std::vector<CheckpointInfo> verified;
  if (is_checkpoint(arguments.path)) {
    verified.push_back(verify_checkpoint(arguments.path));
  } else {
    for (const auto& info : checkpoints_of(arguments.path)) try {
        auto checked = verify_checkpoint(info.path);
        if (checked.problem.empty() || is_folder(info.path)) verified.push_back(std::move(checked));
      } catch (const Error&) {
        if (is_folder(info.path)) throw;  // if it is gone, the run's job has pruned it
      }
  }
  const std::string doing = "verifying " + arguments.path.string();
  if (verified.empty())
    throw Error(ExitCode::data, doing, "there is no checkpoint in it", "Name a run's folder, or a checkpoint's");
  print(verified, /*verified=*/true, arguments.json);
  const auto count = [&](ExitCode code) {
    return std::count_if(verified.begin(), verified.end(), [&](auto& info) { return info.code == code; });
  };
  if (const auto unread = count(ExitCode::retry); unread > 0)
    throw Error(ExitCode::retry, doing, detail::str(unread, " of ", verified.size(), " could not be read"),
                "That says nothing about their content; try again");
  const auto damaged = count(ExitCode::data);
  if (damaged > 0)
    throw Error(ExitCode::data, doing,
                detail::str(damaged, " of ", detail::counted(verified.size(), "checkpoint"),
                            damaged == 1 ? " is" : " are", " damaged"),
                "Resuming takes the newest that is whole");
}

void add(CLI::App& parent, const std::string& name, const std::string& description, const std::string& what,
         const std::string& example, void (*action)(const CheckpointArguments&)) {
  auto arguments = std::make_shared<CheckpointArguments>();
  auto* command = parent.add_subcommand(name, description);
  command->add_option("path", arguments->path, what)->option_text("PATH")->required();
  command->add_flag("--json", arguments->json, "Print the table as JSON");
  command->footer("Example:\n  " + example);
  command->callback([arguments, action] { action(*arguments); });
}

}  // namespace

void add_checkpoint(CLI::App& app) {
  auto* command = app.add_subcommand("checkpoint", "List, verify and export checkpoints");
  command->require_subcommand(1);
  command->footer("Example:\n  muster checkpoint ls runs/demo");
  add(*command, "ls", "The checkpoints of a run, oldest first", "A run's folder", "muster checkpoint ls runs/demo",
      list);
  add(*command, "verify", "Recompute every checksum; ends with 65 if one is damaged",
      "A run's folder, or a checkpoint's", "muster checkpoint verify runs/demo", verify);
  add_export(*command);
}

}  // namespace muster::tool
