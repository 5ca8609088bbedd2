#include "base/text.hpp"
#include "doctor/checks.hpp"

#include <cstdlib>
#include <sstream>

namespace muster::detail::doctor {
namespace {

/// Returns the pairs in a text like "KillWait                = 30 sec" or "Requeue=0 Restarts=0" as an object; null if
/// there is no text.
Json pairs_in(const Json& text) {
  if (!text.is_string()) return nullptr;
  Json pairs = Json::object();
  const auto trimmed = [](const std::string& word) {
    const auto begin = word.find_first_not_of(' ');
    return begin == std::string::npos ? "" : word.substr(begin, word.find_last_not_of(' ') + 1 - begin);
  };
  std::istringstream lines(text.get<std::string>());
  for (std::string line; std::getline(lines, line);) {
    if (const auto equals = line.find(" = "); equals != std::string::npos) {
      pairs[trimmed(line.substr(0, equals))] = trimmed(line.substr(equals + 3));
      continue;
    }
    std::istringstream words(line);
    for (std::string word; words >> word;)
      if (const auto equals = word.find('='); equals != std::string::npos)
        pairs.emplace(word.substr(0, equals), word.substr(equals + 1));
  }
  return pairs;
}

std::string value(const Json& pairs, const char* key) {
  return pairs.is_object() && pairs.contains(key) ? pairs.at(key).get<std::string>() : "";
}

}  // namespace

Json look_at_slurm(const Environment& environment, const RunProgram& run) {
  const char* const job = environment("SLURM_JOB_ID");
  const auto config = run({"scontrol", "show", "config"});
  if (job == nullptr && config.is_null()) return nullptr;
  const char* const end = environment("SLURM_JOB_END_TIME");
  return {{"config", pairs_in(config)},
          {"job",
           job == nullptr || config.is_null() ? Json() : pairs_in(run({"scontrol", "--oneliner", "show", "job", job}))},
          {"in_job", job != nullptr},
          {"end", end == nullptr ? Json() : Json(std::atoll(end))}};
}

Findings check_slurm(const Json& facts, std::chrono::system_clock::time_point now) {
  using enum Finding::Severity;
  constexpr int short_wait_s = 30, little_time_s = 600;
  if (facts.is_null()) return {};
  Findings findings;
  const auto& config = facts.at("config");
  if (config.is_null())
    findings.push_back(
        {warning, "Slurm", "scontrol does not answer", "Look at sinfo and at slurmctld; srun waits for it, too"});
  if (const auto mpi = value(config, "MpiDefault"); !config.is_null() && !mpi.starts_with("pmix"))
    findings.push_back({warning, "Slurm",
                        "MpiDefault is " + (mpi.empty() ? "not set" : mpi) + ", by which srun starts each rank alone",
                        "Start ranks with srun --mpi=pmix"});
  if (value(config, "KillOnBadExit") == "0")
    findings.push_back({warning, "Slurm", "KillOnBadExit is 0, so that ranks go on waiting for one that is lost",
                        "Start ranks with srun --kill-on-bad-exit=1, or with muster run"});
  if (const auto wait = value(config, "KillWait"); !wait.empty() && std::atoi(wait.c_str()) < short_wait_s)
    findings.push_back({warning, "Slurm", "KillWait leaves " + wait + " to save at the end of the allocation",
                        "Have the job signalled before with sbatch --signal=B:USR1@120"});
  // PreemptMode is "OFF", "CANCEL", "REQUEUE", "GANG,SUSPEND" or another list of such words.
  if (const auto mode = value(config, "PreemptMode"); mode.find("CANCEL") != std::string::npos)
    findings.push_back(
        {warning, "Slurm", "PreemptMode is " + mode + ": a preempted job is not queued again",
         "Choose a partition that is not preempted, or submit it again: it goes on from its checkpoint"});
  if (facts.at("in_job") == true && value(facts.at("job"), "Requeue") == "0")
    findings.push_back({warning, "Slurm", "the job is not queued again after a lost node or a preemption",
                        "Submit it with sbatch --requeue"});
  if (facts.at("end").is_number()) {
    const auto left = facts.at("end").get<std::int64_t>() -
                      std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
    if (left > 0 && left < little_time_s)
      findings.push_back(
          {warning, "Slurm", str("the allocation ends in ", left, " s"), "Ask for more with sbatch --time"});
  }
  if (findings.empty())
    findings.push_back(
        {ok, "Slurm", "MpiDefault " + value(config, "MpiDefault") + ", KillWait " + value(config, "KillWait")});
  return findings;
}

}  // namespace muster::detail::doctor
