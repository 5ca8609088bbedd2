#include "base/program.hpp"
#include "doctor/checks.hpp"
#include "launch/launcher.hpp"

#include <algorithm>
#include <regex>

namespace muster::detail::doctor {
namespace {

/// Returns "Open MPI", "Intel MPI" or "MPICH" if the library or the mpirun of that MPI has printed this text; else "".
std::string family_of(const std::string& text) {
  if (text.find("Open MPI") != std::string::npos || text.find("OpenRTE") != std::string::npos) return "Open MPI";
  if (text.find("Intel(R) MPI") != std::string::npos) return "Intel MPI";
  if (text.find("MPICH") != std::string::npos || text.find("HYDRA") != std::string::npos) return "MPICH";
  return {};
}

/// Returns the first version in the text, such as "4.1.4"; empty if there is none.
std::string version_in(const std::string& text) {
  std::smatch found;
  return std::regex_search(text, found, std::regex(R"(\d+\.\d+(\.\d+)*)")) ? found.str() : "";
}

/// Returns "4.1" for "4.1.4". Releases of one series work together.
std::string series_of(const std::string& version) {
  const auto dot = version.find('.');
  return dot == std::string::npos ? version : version.substr(0, version.find('.', dot + 1));
}

Findings check_launcher(const Json& facts, const std::string& library) {
  using enum Finding::Severity;
  const auto& mpirun = facts.at("mpirun");
  if (mpirun.is_null()) {
    const auto fact = "there is no " + launch::launcher_of(library) + " in PATH, which starts ranks of " + library;
    if (facts.at("srun") == true)
      return {{warning, "mpirun", fact,
               "Start ranks with srun --mpi=" + launch::srun_plugin(library) + ", or load its module"}};
    return {{to_mend, "mpirun", fact, "Install it (Debian: openmpi-bin or mpich), or load its module"}};
  }
  const auto path = mpirun.at("path").get<std::string>();
  const auto text = mpirun.at("version").is_string() ? mpirun.at("version").get<std::string>() : "";
  const auto theirs = family_of(text), ours = family_of(library);
  if (text.empty())
    return {{may_pass, "mpirun", path + " --version gave no answer within some seconds", "Run it by hand"}};
  if (!theirs.empty() && !ours.empty() && theirs != ours)
    return {{to_mend, "mpirun", path + " is of " + theirs + ", and muster is linked with " + library,
             "Put the mpirun of " + ours + " first in PATH, or load its module"}};
  const auto version = version_in(text), library_version = version_in(library);
  if (!version.empty() && series_of(version) != series_of(library_version))  // Hydra's first line has no version
    return {{warning, "mpirun", path + " is of version " + version + ", and muster is linked with " + library,
             "Put the mpirun of " + library_version + " first in PATH"}};
  return {};
}

}  // namespace

Json look_at_mpi(const std::string& library, const Environment& environment, const RunProgram& run) {
  Json facts{{"library", library}, {"mpirun", nullptr}, {"srun", !find_program("srun", environment("PATH")).empty()}};
  for (const auto& name : {launch::launcher_of(library), std::string("mpiexec")}) {
    const auto found = find_program(name, environment("PATH"));
    if (found.empty()) continue;
    auto version = run({found.string(), "--version"});
    if (version.is_string()) {  // keep only the first line, since Hydra prints many
      auto text = version.get<std::string>();
      text.resize(std::min(text.size(), text.find('\n')));
      version = text;
    }
    facts["mpirun"] = {{"path", found.string()}, {"version", version}};
    break;
  }
  return facts;
}

Findings check_mpi(const Json& facts, const MpiStart& start) {
  using enum Finding::Severity;
  const auto library = facts.at("library").get<std::string>();
  Findings findings;
  if (!start.problem.empty())
    findings.push_back({start.may_pass ? may_pass : to_mend, "MPI", start.problem, start.remedy});
  if (!start.calls_from_threads && start.problem.empty())
    findings.push_back(
        {warning, "MPI",
         library + " lets only one thread call it, so that gloo, NCCL, sweeps and async_save do not work",
         "Use an MPI with MPI_THREAD_MULTIPLE"});
  const bool alone = start.launcher.empty();
  // If a launcher has started this process, the mpirun in PATH does not matter.
  if (alone) {
    auto more = check_launcher(facts, library);
    findings.insert(findings.end(), more.begin(), more.end());
  }
  if (findings.empty()) {
    const auto& mpirun = facts.at("mpirun");
    findings.push_back(
        {ok, "MPI",
         library + (start.calls_from_threads ? ", several threads may call it" : "") +
             (alone ? "; mpirun is " + mpirun.at("path").get<std::string>() : "; started by " + start.launcher)});
  }
  return findings;
}

}  // namespace muster::detail::doctor
