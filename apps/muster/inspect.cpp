// muster inspect: describes a dataset, a checkpoint or a run.
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "dataset_text.hpp"
#include "text.hpp"

#include <muster/checkpoint.hpp>
#include <muster/convert.hpp>
#include <muster/error.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

namespace muster::tool {
namespace {

/// Leaves out values that are nested so deeply that printing them would overflow the stack.
bool shallow(int depth, Json::parse_event_t, const Json&) { return depth < 256; }

/// Opens a file for reading. Not open if there is no such file; throws an Error (ExitCode::data) if it cannot be read.
std::ifstream open(const std::filesystem::path& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return {};
  std::ifstream file;
  if (std::filesystem::is_regular_file(status)) file.open(path);
  if (!file.is_open())
    throw Error(ExitCode::data, "reading " + path.string(),
                error                                      ? error.message()
                : std::filesystem::is_regular_file(status) ? std::strerror(errno)
                                                           : "it is no regular file",
                "Check the path and the permissions");
  return file;
}

/// The JSON in a file; null if there is none or it is not JSON.
Json read_json(const std::filesystem::path& path) {
  auto file = open(path);
  auto value = file.is_open() ? Json::parse(file, shallow, false) : Json();
  return value.is_discarded() ? Json() : value;
}

/// The last complete line; the last line of a killed run may be incomplete.
Json last_report(const std::filesystem::path& path) {
  auto file = open(path);
  Json last;
  for (std::string line; std::getline(file, line);)
    if (auto report = Json::parse(line, shallow, false); report.is_object()) last = std::move(report);
  return last;
}

void inspect_dataset(const std::string& path, bool json) {
  auto dataset = describe_dataset(path);
  if (json) {
    dataset["kind"] = "dataset";
    print_json(dataset);
    return;
  }
  std::cout << dataset_text(dataset);
  if (const auto& groups = dataset.at("groups"); !groups.empty()) {
    std::cout << "\ngroups inside\n";
    for (const auto& group : groups) std::cout << bullet(group.get<std::string>());
  }
  if (const auto& advice = dataset.at("advice"); !advice.empty()) {
    std::cout << "\nadvice\n";
    for (const auto& line : advice) std::cout << bullet(line.get<std::string>());
  }
}

/// Name, type and shape of the tensors in manifest.json; empty if it cannot be read.
Json listed_tensors(const std::filesystem::path& checkpoint) {
  Json tensors = Json::array();
  const auto manifest = read_json(checkpoint / "manifest.json");
  if (!manifest.is_object() || !manifest.contains("tensors")) return tensors;
  for (const auto& tensor : manifest.at("tensors"))
    tensors.push_back({{"name", tensor.at("name")},
                       {"type", tensor.at("type")},
                       {"shape", tensor.at("shape")},
                       {"same_as", tensor.value("same_as", "")}});
  return tensors;
}

std::string tensors_text(const Json& tensors) {
  Table table{{{"tensor"}, {"type"}, {"shape"}}, {}};
  for (const auto& tensor : tensors) {
    const auto same_as = tensor.at("same_as").get<std::string>();
    table.rows.push_back({tensor.at("name"), tensor.at("type"),
                          tensor.at("shape").dump() + (same_as.empty() ? "" : " the same as " + same_as)});
  }
  return to_text(table);
}

void inspect_checkpoint(const std::filesystem::path& path, bool json) {
  const auto info = verify_checkpoint(path);
  // The list in a damaged manifest cannot be trusted.
  const auto tensors = info.problem.empty() ? listed_tensors(path) : Json::array();
  if (json) {
    auto checkpoint = to_json(info);
    checkpoint["kind"] = "checkpoint";
    checkpoint["tensors"] = tensors;
    print_json(checkpoint);
  } else {
    std::cout << printable(path.string()) << ": a checkpoint\n" << checkpoints_text({info});
    if (!info.metrics.empty()) std::cout << "\nmetrics\n" << to_text(flattened(info.metrics));
    if (!tensors.empty()) std::cout << "\n" << tensors_text(tensors);
  }
  if (!info.problem.empty())
    throw Error(info.code, "inspecting " + path.string(),
                info.code == ExitCode::retry ? "it cannot be read" : "it is damaged",
                "`muster checkpoint verify` says which checkpoints of a run are whole");
}

void inspect_run(const std::filesystem::path& path, bool json) {
  const auto params = read_json(path / "params.json");
  const auto report = last_report(path / "result.json");
  const auto checkpoints = checkpoints_of(path);
  if (json) {
    Json rows = Json::array();
    for (const auto& info : checkpoints) rows.push_back(to_json(info));
    print_json(
        {{"kind", "run"}, {"path", path.string()}, {"params", params}, {"last_report", report}, {"checkpoints", rows}});
    return;
  }
  std::cout << printable(path.string()) << ": a run\n";
  if (!params.is_null()) std::cout << "\nparams.json\n" << to_text(flattened(params));
  std::cout << "\nlast report\n" << (report.is_null() ? "none yet\n" : to_text(flattened(report)));
  std::cout << "\ncheckpoints\n" << (checkpoints.empty() ? "none yet\n" : checkpoints_text(checkpoints));
}

void inspect(const std::string& path, bool json) {
  if (!is_folder(path)) return inspect_dataset(path, json);
  const std::filesystem::path folder(path);
  if (is_checkpoint(folder)) return inspect_checkpoint(folder, json);
  if (is_run(folder)) return inspect_run(folder, json);
  throw Error(ExitCode::data, "inspecting " + path, "the folder is neither a run nor a checkpoint",
              "A run has params.json or result.json, a checkpoint manifest.json");
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Arguments {
    std::string path;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("inspect", "Say what a dataset, a checkpoint or a run holds");
  command->add_option("path", arguments->path, "FILE.h5[:/group], a checkpoint's folder or a run's")
      ->option_text("PATH")
      ->required();
  command->add_flag("--json", arguments->json, "Print it as JSON");
  command->footer("Example:\n  muster inspect train.h5\n  muster inspect runs/demo");
  command->callback([arguments] { inspect(arguments->path, arguments->json); });
}

}  // namespace muster::tool
