// muster inspect: describes a dataset, a checkpoint or a run.
#include "batch/script.hpp"
#include "checkpoint_text.hpp"
#include "commands.hpp"
#include "dataset_text.hpp"
#include "interrupt.hpp"
#include "progress_line.hpp"
#include "run_files.hpp"
#include "text.hpp"

#include <muster/checkpoint.hpp>
#include <muster/convert.hpp>
#include <muster/error.hpp>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

namespace muster::tool {
namespace {

Json measure(const std::string& path) {
  const InterruptGuard interrupt;
  ProgressLine line;
  line.show("measuring");
  return measure_dataset(path, [&] { interrupt.check(); });
}

/// Formats the result of measure_dataset() as a table.
std::string measured_text(const Json& measured) {
  Table table{{{"layout"}, {"pass"}, {"samples/s", true}, {"per second", true}}, {}};
  const auto add = [&](const char* layout, const char* pass, const Json& speed) {
    const auto whole = [](const Json& number) { return static_cast<std::uint64_t>(number.get<double>()); };
    if (!speed.is_null())
      table.rows.push_back(
          {layout, pass, std::to_string(whole(speed.at("samples_per_s"))), bytes_text(whole(speed.at("bytes_per_s")))});
  };
  for (const auto& [key, layout] : {std::pair{"now", "as it is"}, {"converted", "as advised"}}) {
    if (measured.at(key).is_null()) continue;
    const auto& passes = measured.at(key);
    const bool all_alike = passes.at("later_passes").is_null();
    add(layout, all_alike ? "each" : "first", passes.at("first_pass"));
    add("", "later", passes.at("later_passes"));
  }
  return to_text(table) + "\n" +
         bullet(measured.at("samples").dump() + " samples in random order, " + measured.at("batch").dump() +
                " at once, from memory (the system's cache): a disk may be slower");
}

void inspect_dataset(const std::string& path, bool json, bool measures) {
  auto dataset = describe_dataset(path);
  if (json) {
    dataset["kind"] = "dataset";
    if (measures) dataset["measured"] = measure(path);
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
  if (!measures) return;
  std::cout << std::flush;
  const auto measured = measure(path);
  std::cout << "\nmeasured\n" << measured_text(measured);
}

/// Returns name, type and shape of each tensor in manifest.json, and in "same_as" the tensor whose values it shares, if
/// any; empty if the file lists no tensors.
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
  // A name such as "best" may move to another checkpoint meanwhile.
  const auto folder = Checkpoint::from_directory(path).path();
  auto info = verify_checkpoint(folder);
  info.path = path;
  // Do not use the list in a damaged manifest, which cannot be trusted.
  const auto tensors = info.problem.empty() ? listed_tensors(folder) : Json::array();
  if (json) {
    auto checkpoint = to_json(info, /*verified=*/true);
    checkpoint["kind"] = "checkpoint";
    checkpoint["tensors"] = tensors;
    print_json(checkpoint);
  } else {
    std::cout << printable(path.string()) << ": a checkpoint\n" << checkpoints_text({info}, /*verified=*/true);
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
  const auto reports = Reports(path).read_new();
  const auto report = reports.empty() ? Json() : reports.back();
  const auto summary = summary_of(path);
  const auto checkpoints = checkpoints_of(path);
  if (json) {
    Json rows = Json::array();
    for (const auto& info : checkpoints) rows.push_back(to_json(info, /*verified=*/false));
    print_json({{"kind", "run"},
                {"path", path.string()},
                {"state", summary.state},
                {"status", summary.status},
                {"params", params},
                {"last_report", report},
                {"checkpoints", rows}});
    return;
  }
  std::cout << printable(path.string()) << ": a run, " << summary.state << "\n";
  if (summary.status.is_object())
    std::cout << progress_text(summary.status) << ", last sign of life " << age_text(summary.updated) << "\n";
  if (const auto time = time_text(summary.status); !time.empty()) std::cout << "\n" << time;
  if (!params.is_null()) std::cout << "\nparams.json\n" << to_text(flattened(params));
  std::cout << "\nlast report\n" << (report.is_null() ? "none yet\n" : to_text(flattened(report)));
  std::cout << "\ncheckpoints\n"
            << (checkpoints.empty() ? "none yet\n" : checkpoints_text(checkpoints, /*verified=*/false));
}

/// Prints what a run reports while it trains, as the program itself does. Returns when the run is over.
void follow(const std::filesystem::path& path) {
  if (!is_folder(path) || is_checkpoint(path) || !is_run(path))
    throw Error(ExitCode::data, "following " + path.string(), "it is not a run's folder", "Name one, as in runs/demo");
  ProgressLine line;
  Reports reports(path);
  std::int64_t reported = 0;
  for (;; std::this_thread::sleep_for(std::chrono::seconds(1))) {
    if (!is_folder(path))
      throw Error(ExitCode::data, "following " + path.string(), "the folder is gone", "It was moved or removed");
    for (const auto& row : reports.read_new()) {
      line.erase();
      std::cout << printable(report_text(row)) << std::endl;
      reported = count_at(row, "timestamp");
    }
    if (!std::cout)
      throw Error(ExitCode::retry, "following " + path.string(), "standard output does not take what is printed",
                  "Check the space and the permissions there");
    const auto status = read_json(path / "status.json");
    const auto state = state_of(path, status, reported);
    if (may_go_on(state)) {
      line.show(printable(progress_text(status)) + (state == "training" ? "" : ", " + state));
      continue;
    }
    line.erase();
    std::cout << printable(path.string()) << " is " << state;
    if (status.is_object() && status.value("error", Json()).is_string())
      std::cout << ": " << printable(status.at("error").get<std::string>());
    std::cout << std::endl;
    return;
  }
}

void inspect(const std::string& path, bool json, bool measures) {
  std::error_code none;
  const auto has = [&](const char* file) { return std::filesystem::exists(std::filesystem::path(path) / file, none); };
  const bool is_store = has("zarr.json") || has(".zgroup") || has(".zarray");  // of Zarr
  if (!is_folder(path) || is_store) return inspect_dataset(path, json, measures);
  if (measures)
    throw Error(ExitCode::usage, "measuring " + path, "it is a folder, and only datasets are measured",
                "Name one, as in train.h5, or leave --measure out");
  const std::filesystem::path folder(path);
  if (is_checkpoint(folder)) return inspect_checkpoint(folder, json);
  // A folder that DataParallel::save() has written has checkpoints, but no other file of a run.
  if (!std::filesystem::exists(folder / "params.json") && !std::filesystem::exists(folder / "result.json"))
    if (const auto saved = checkpoints_of(folder); saved.size() == 1) return inspect_checkpoint(saved[0].path, json);
  if (is_run(folder)) return inspect_run(folder, json);
  if (is_sweep(folder))
    throw Error(
        ExitCode::data, "inspecting " + path, "it is a sweep",
        "`muster ls " + shell_word(path) + "` lists its trials, `muster report " + shell_word(path) + "` shows it");
  throw Error(
      ExitCode::data, "inspecting " + path, "the folder is neither a run, a checkpoint nor a Zarr store",
      "A run has params.json or result.json, a checkpoint manifest.json, a store zarr.json, .zgroup or .zarray");
}

}  // namespace

void add_inspect(CLI::App& app) {
  struct Arguments {
    std::string path;
    bool json = false, follow = false, measure = false;
  };
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("inspect", "Say what a dataset, a checkpoint or a run holds");
  command
      ->add_option("path", arguments->path, "FILE.h5[:/group], STORE.zarr[:/group], a checkpoint's folder or a run's")
      ->option_text("PATH")
      ->required();
  auto* json = command->add_flag("--json", arguments->json, "Print it as JSON");
  auto* follows = command->add_flag("--follow", arguments->follow, "Show a run's progress and reports until it is over")
                      ->excludes(json);
  command
      ->add_flag("--measure", arguments->measure,
                 "Measure how fast a dataset is read, and how fast it would be converted as advised")
      ->excludes(follows);
  command->footer("Example:\n  muster inspect train.h5 --measure\n  muster inspect runs/demo --follow");
  command->callback([arguments] {
    if (arguments->follow) return follow(arguments->path);
    inspect(arguments->path, arguments->json, arguments->measure);
  });
}

}  // namespace muster::tool
