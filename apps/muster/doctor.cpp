// muster doctor: says whether training would start on this machine or on a launcher's ranks, and what to mend.
#include "base/text.hpp"
#include "commands.hpp"
#include "run_files.hpp"
#include "text.hpp"

#include <muster/doctor.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace muster::tool {
namespace {

constexpr std::size_t most_hosts = 2;  ///< the most hosts that a finding lists by name

std::string name_of(Finding::Severity severity) {
  using enum Finding::Severity;
  return severity == to_mend ? "to_mend" : severity == may_pass ? "may_pass" : severity == warning ? "warning" : "ok";
}

std::string mark_of(Finding::Severity severity) {
  using enum Finding::Severity;
  return severity == ok ? "[ok]   " : severity == warning ? "[warn] " : "[bad]  ";
}

std::string text_of(const Finding& finding, bool names_hosts) {
  std::string text = finding.subject;
  if (names_hosts && !finding.hosts.empty())
    text += " on " + detail::listed(finding.hosts, most_hosts, std::identity());
  text += ": " + finding.fact;
  if (!finding.remedy.empty()) text += ". " + finding.remedy;
  const auto mark = mark_of(finding.severity);
  std::string lines;
  for (const auto& line : wrapped(printable(text), line_width - mark.size()))
    lines += (lines.empty() ? mark : std::string(mark.size(), ' ')) + line + "\n";
  return lines;
}

std::string things(std::ptrdiff_t count) { return detail::counted(count, "thing"); }

std::string verdict(const Examination& examination) {
  const auto count = [&](Finding::Severity severity) {
    return std::ranges::count(examination.findings, severity, &Finding::severity);
  };
  const auto to_mend = count(Finding::Severity::to_mend), may_pass = count(Finding::Severity::may_pass);
  if (to_mend + may_pass == 0) return "training would start here";
  std::string text = "training would not start here: ";
  if (to_mend > 0) text += things(to_mend) + " to install or configure";
  if (may_pass > 0) text += (to_mend > 0 ? ", " : "") + things(may_pass) + " that may pass by itself";
  return text;
}

void print_text(const Examination& examination) {
  std::string title = "muster doctor on " + examination.host + ": ";
  if (examination.launcher.empty())
    title += "started alone";
  else
    title += detail::str(detail::counted(examination.ranks, "rank"),
                         examination.nodes > 1 ? detail::str(" on ", examination.nodes, " nodes") : "", " under ",
                         examination.launcher);
  std::cout << printable(title) << "\n";
  for (const auto& finding : examination.findings) std::cout << text_of(finding, examination.nodes > 1);
  std::cout << verdict(examination) << std::endl;
}

void print_as_json(const Examination& examination) {
  nlohmann::json findings = nlohmann::json::array();
  for (const auto& finding : examination.findings)
    findings.push_back({{"severity", name_of(finding.severity)},
                        {"subject", finding.subject},
                        {"fact", finding.fact},
                        {"remedy", finding.remedy},
                        {"hosts", finding.hosts}});
  print_json({{"host", examination.host},
              {"launcher", examination.launcher},
              {"ranks", examination.ranks},
              {"nodes", examination.nodes},
              {"exit_code", static_cast<int>(examination.exit_code())},
              {"findings", findings},
              {"facts", examination.facts}});
  std::cout.flush();
}

}  // namespace

void add_doctor(CLI::App& app) {
  auto* command = app.add_subcommand("doctor", "Find out whether training would start here, and what to mend");
  const auto options = std::make_shared<DoctorOptions>();
  const auto storage = std::make_shared<std::string>(default_storage());
  const auto json = std::make_shared<bool>(false), start_mpi = std::make_shared<bool>(false);
  command->add_option("--storage", *storage, "Where runs are to lie [./runs, or MUSTER_STORAGE]")->option_text("DIR");
  command->add_flag("--json", *json, "Print all facts and findings as JSON");
  command->add_flag("--start-mpi", *start_mpi)->group("");
  command->footer(
      "It ends with 0 if training would start, with 69 if something is to be installed\n"
      "or configured, and with 75 if what is wrong may pass by itself.\n\n"
      "Example:\n  muster doctor\n  mpirun -n 4 muster doctor --storage /shared/runs");
  command->callback([options, storage, json, start_mpi] {
    if (*start_mpi) {
      std::cout << (start_mpi_alone() ? "multiple" : "single") << "\n";
      return;
    }
    options->storage = *storage;
    options->start_mpi = {std::filesystem::read_symlink("/proc/self/exe").string(), "doctor", "--start-mpi"};
    const auto code = examine(*options, *json ? print_as_json : print_text);
    if (code != ExitCode::done) throw CLI::RuntimeError(static_cast<int>(code));
  });
}

}  // namespace muster::tool
