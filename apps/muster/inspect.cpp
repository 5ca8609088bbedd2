// muster inspect: what a dataset, a checkpoint or a run is.
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "dataset_text.hpp"
#include "text.hpp"

#include <muster/checkpoint.hpp>
#include <muster/convert.hpp>
#include <muster/error.hpp>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

namespace muster::tool {
namespace {

/// The JSON in a file; null if there is none or it is not JSON.
Config read_json(const std::filesystem::path& path) {
  std::ifstream file(path);
  auto value = file ? Config::parse(file, nullptr, false) : Config();
  return value.is_discarded() ? Config() : value;
}

/// The last line that is whole: a run that was killed may have left half a one.
Config last_report(const std::filesystem::path& path) {
  std::ifstream file(path);
  Config last;
  for (std::string line; std::getline(file, line);)
    if (auto report = Config::parse(line, nullptr, false); report.is_object()) last = std::move(report);
  return last;
}

void inspect_dataset(const std::string& path, bool json) {
  auto dataset = describe_dataset(path);
  if (json) {
    dataset["kind"] = "dataset";
    std::cout << dataset.dump(2) << "\n";
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

void inspect_checkpoint(const std::filesystem::path& path, bool json) {
  const auto info = verify_checkpoint(path);
  if (json) {
    auto checkpoint = to_json(info);
    checkpoint["kind"] = "checkpoint";
    std::cout << checkpoint.dump(2) << "\n";
    return;
  }
  std::cout << path.string() << ": a checkpoint\n" << checkpoints_text({info});
  if (!info.metrics.empty()) std::cout << "\n" << to_text(flattened(info.metrics));
}

void inspect_run(const std::filesystem::path& path, bool json) {
  const auto params = read_json(path / "params.json");
  const auto report = last_report(path / "result.json");
  const auto checkpoints = list_checkpoints(path);
  if (json) {
    Config rows = Config::array();
    for (const auto& info : checkpoints) rows.push_back(to_json(info));
    std::cout << Config{{"kind", "run"},
                        {"path", path.string()},
                        {"params", params},
                        {"last_report", report},
                        {"checkpoints", rows}}
                     .dump(2)
              << "\n";
    return;
  }
  std::cout << path.string() << ": a run\n";
  if (!params.is_null()) std::cout << "\nparams.json\n" << to_text(flattened(params));
  std::cout << "\nlast report\n" << (report.is_null() ? "none yet\n" : to_text(flattened(report)));
  std::cout << "\ncheckpoints\n" << (checkpoints.empty() ? "none yet\n" : checkpoints_text(checkpoints));
}

void inspect(const std::string& path, bool json) {
  if (!std::filesystem::is_directory(path)) return inspect_dataset(path, json);
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
