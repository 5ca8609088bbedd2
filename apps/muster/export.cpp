// muster checkpoint export: writes the weights of a checkpoint in a format for Python.
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "interrupt.hpp"
#include "progress_line.hpp"
#include "text.hpp"

#include <muster/checkpoint.hpp>
#include <muster/error.hpp>
#include <muster/exported.hpp>
#include <muster/weights.hpp>

#include <filesystem>
#include <iostream>
#include <memory>
#include <set>
#include <string>

namespace muster::tool {
namespace {

struct ExportArguments {
  std::filesystem::path checkpoint, out, program;
  std::string format, entry;
  bool force = false, json = false;
};

Checkpoint open_checkpoint(const std::filesystem::path& path) {
  if (is_folder(path) && !is_checkpoint(path))
    for (auto checkpoints = list_checkpoints(path); !checkpoints.empty(); checkpoints.pop_back())
      if (const auto& newest = checkpoints.back(); newest.problem.empty())
        throw Error(ExitCode::usage, "exporting " + path.string(), "it is a run, not one of its checkpoints",
                    "The newest is " + newest.path.string());
  return Checkpoint::from_directory(path);
}

/// Returns the tensors of the state's entry `entry`, with paths relative to it. If `entry` is empty, sets it to the
/// only entry; if there are several, to "model". Throws an Error if there is no such entry.
StateDict take_entry(const StateDict& state, std::string& entry, const std::filesystem::path& checkpoint) {
  std::set<std::string> entries;
  for (const auto& [path, tensor] : state.tensors) entries.insert(path.substr(0, path.find('/')));
  if (entry.empty()) entry = entries.size() == 1 ? *entries.begin() : "model";
  if (!entries.contains(entry)) {
    std::string names;
    for (const auto& name : entries) names += (names.empty() ? "" : ", ") + name;
    throw Error(ExitCode::usage, "exporting " + checkpoint.string(), "it has no tensors of an entry \"" + entry + "\"",
                names.empty() ? "It has none at all" : "Choose one with --entry: " + names);
  }
  StateDict part;
  for (const auto& [path, tensor] : state.tensors)
    if (path == entry || path.starts_with(entry + "/"))
      part.tensors.emplace(path == entry ? path : path.substr(entry.size() + 1), tensor);
  return part;
}

void check_output(const ExportArguments& arguments) {
  require_outside_records(arguments.out);
  std::error_code ignored;  // the writer of the file reports errors
  if (!arguments.force && std::filesystem::is_regular_file(std::filesystem::symlink_status(arguments.out, ignored)))
    throw Error(ExitCode::usage, "writing " + arguments.out.string(), "it is there already",
                "Choose another name, or replace it with --force");
}

void export_weights(ExportArguments& arguments) {
  if (const bool to_program = arguments.format == "pt2"; to_program == arguments.program.empty())
    throw Error(ExitCode::usage, "exporting " + arguments.checkpoint.string(),
                to_program ? "no program is named" : "only pt2 has a program",
                to_program ? "Name the file that was trained with --program" : "Leave --program out, or use --to pt2");
  check_output(arguments);
  const auto state = take_entry(open_checkpoint(arguments.checkpoint).to_dict(), arguments.entry, arguments.checkpoint);
  const InterruptGuard interrupt;
  {
    ProgressLine line;
    const ExportOptions options{.replace = arguments.force, .progress = [&](std::uint64_t done, std::uint64_t total) {
                                  interrupt.check();
                                  line.show("writing " + bytes_text(done) + " of " + bytes_text(total));
                                }};
    if (arguments.format == "pt2")
      save_exported(arguments.program, state, arguments.out, options);
    else
      (arguments.format == "torch" ? save_torch : save_safetensors)(state, arguments.out, options);
  }
  const auto bytes = std::filesystem::file_size(arguments.out);
  if (arguments.json)
    print_json({{"path", arguments.out.string()},
                {"format", arguments.format},
                {"entry", arguments.entry},
                {"tensors", state.tensors.size()},
                {"bytes", bytes}});
  else
    std::cout << "wrote " << printable(arguments.out.string()) << ": the " << state.tensors.size() << " tensors of "
              << printable(arguments.entry) << ", " << bytes_text(bytes) << "\n";
}

}  // namespace

void add_export(CLI::App& checkpoint) {
  auto arguments = std::make_shared<ExportArguments>();
  auto* command = checkpoint.add_subcommand("export", "Write the weights of a checkpoint for Python");
  command->add_option("checkpoint", arguments->checkpoint, "A checkpoint's folder")
      ->option_text("CHECKPOINT")
      ->required();
  command->add_option("out", arguments->out, "The file to make")->option_text("OUT")->required();
  command
      ->add_option("--to", arguments->format,
                   "safetensors; torch: a state dict for torch.load; pt2: a program for torch.export.load")
      ->option_text("FORMAT")
      ->check(CLI::IsMember({"safetensors", "torch", "pt2"}))
      ->required();
  command->add_option("--program", arguments->program, "For pt2: the program that the model was loaded from")
      ->option_text("NET.pt2");
  command->add_option("--entry", arguments->entry, "The entry of the state; model unless given")->option_text("NAME");
  command->add_flag("--force", arguments->force, "Replace OUT if it is there");
  command->add_flag("--json", arguments->json, "Say what was written as JSON");
  command->footer(
      "Example:\n  muster checkpoint export runs/demo/checkpoint_000003 --to torch demo.pt\n"
      "  python3 -c 'import torch; print(torch.load(\"demo.pt\", weights_only=True))'\n"
      "  muster checkpoint export CHECKPOINT --to pt2 --program net.pt2 demo.pt2");
  command->callback([arguments] { export_weights(*arguments); });
}

}  // namespace muster::tool
