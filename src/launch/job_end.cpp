#include "launch/job_end.hpp"

#include "base/duration.hpp"
#include "base/log.hpp"
#include "base/number.hpp"
#include "base/program.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <sstream>

namespace muster::detail::launch {
namespace {

using std::chrono::seconds, std::chrono::steady_clock, std::chrono::system_clock;

/// How long the batch system's program may take: it waits for minutes if its server does not answer.
constexpr seconds answer_timeout{3};

/// Parses a local time; `format` as for strptime, for the whole text.
JobEndTime local_time(const std::string& text, const char* format) {
  std::tm local{};
  const char* const end = ::strptime(text.c_str(), format, &local);
  if (end == nullptr || *end != '\0') return {};
  local.tm_isdst = -1;
  const auto time = std::mktime(&local);
  return time < 0 ? JobEndTime() : system_clock::from_time_t(time);
}

/// Parses "HH:MM:SS" or "D:HH:MM:SS", as PBS writes them, or a number of seconds. end_in_bjobs() makes "HH:MM:SS", too.
std::optional<seconds> duration_of(std::string text) {
  if (text.find('-') != text.npos) return {};
  if (std::ranges::count(text, ':') == 3) text[text.find(':')] = '-';
  return parse_clock(text, seconds(1));
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

JobEndTime within_reach(JobEndTime end, system_clock::time_point now) {
  return end && *end > now && *end < now + longest_time ? end : std::nullopt;
}

}  // namespace

JobEndTime end_of_allocation(const Environment& environment, system_clock::time_point now) {
  for (const char* const name : {"SLURM_JOB_END_TIME", variable::job_end})
    if (const auto end = parse_number<std::time_t>(value_of(name, environment));
        end && *end > system_clock::to_time_t(now) && *end < 1'000'000'000'000)
      if (const auto known = within_reach(system_clock::from_time_t(*end), now)) return known;
  return {};
}

std::string job_end_warning(const Environment& environment, system_clock::time_point now) {
  const auto text = value_of(variable::job_end, environment);
  if (text.empty()) return {};
  const auto end = parse_number<std::time_t>(text);
  if (!end)
    throw Error(ExitCode::usage, "reading the environment", "MUSTER_JOB_END_TIME=" + text + " is no number of seconds",
                "Set it to the seconds since 1970, as date +%s -d '12 hours' prints them, or unset it");
  if (*end > system_clock::to_time_t(now)) return {};
  return "MUSTER_JOB_END_TIME is in the past; the end of this job is not known";
}

std::vector<std::string> job_end_question(const Environment& environment) {
  if (auto job = value_of("SLURM_JOB_ID", environment); !job.empty()) {
    // The last job of a Slurm array has the same id as the whole array, so ask by the array's id and the task's number.
    const auto array = value_of("SLURM_ARRAY_JOB_ID", environment), task = value_of("SLURM_ARRAY_TASK_ID", environment);
    if (!array.empty() && !task.empty()) job = array + "_" + task;
    return {"env", "SLURM_TIME_FORMAT=standard", "squeue", "-h", "-j", job, "-o", "%e"};
  }
  if (auto job = value_of("PBS_JOBID", environment); !job.empty()) return {"qstat", "-f", job};
  if (auto job = value_of("LSB_JOBID", environment); !job.empty()) {
    if (const auto index = value_of("LSB_JOBINDEX", environment); !index.empty() && index != "0")
      job += "[" + index + "]";
    return {"bjobs", "-noheader", "-o", "time_left", job};
  }
  return {};
}

JobEndTime end_in_squeue(const std::string& text) { return local_time(trimmed(text), "%Y-%m-%dT%H:%M:%S"); }

JobEndTime end_in_qstat(const std::string& text, system_clock::time_point now) {
  std::string limit, used, began;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto sign = line.find(" = ");
    if (sign == std::string::npos) continue;
    const auto key = trimmed(line.substr(0, sign)), value = trimmed(line.substr(sign + 3));
    if (key == "Resource_List.walltime") limit = value;
    if (key == "resources_used.walltime") used = value;
    if (key == "stime" || key == "start_time") began = value;  // PBS, Torque
  }
  const auto whole = duration_of(limit);
  if (!whole) return {};
  if (const auto begin = local_time(began, "%a %b %d %H:%M:%S %Y")) return *begin + *whole;
  if (const auto past = duration_of(used)) return now + *whole - *past;
  return {};
}

JobEndTime end_in_bjobs(const std::string& text, system_clock::time_point now) {
  // "1:05 E" and "1:05 X" are estimates of the job's run time, not limits.
  std::istringstream words(text);
  std::string time, kind, more;
  words >> time >> kind;
  if ((!kind.empty() && kind != "L") || (words >> more) || time.find(':') == std::string::npos) return {};
  const auto left = duration_of(time + ":00");
  return left ? JobEndTime(now + *left) : JobEndTime();
}

AskedJobEnd ask_for_job_end(const Environment& environment) {
  const auto question = job_end_question(environment);
  if (question.empty()) return {};
  const auto& program = question.front() == "env" ? question.at(2) : question.front();
  const auto unknown = "the end of this job is not known: " + program;
  const auto answer = output_of(question, answer_timeout);
  if (!answer) return {.note = unknown + " is missing, has failed or has not answered within 3 s"};
  const auto now = system_clock::now();
  const auto end = program == "squeue"  ? end_in_squeue(*answer)
                   : program == "qstat" ? end_in_qstat(*answer, now)
                                        : end_in_bjobs(*answer, now);
  if (const auto known = within_reach(end, now)) return {.end = known};
  return {.note = unknown + " names no time to come"};
}

void LaunchEnd::ask() {
  if (!supervisor() && is_first_process(::getenv) && !end_of_allocation(::getenv, system_clock::now()))
    asked_ = ask_for_job_end(::getenv);
}

void LaunchEnd::choose(const Communicator& ranks, const LaunchFlags& flags) {
  const auto now = system_clock::now();
  if (flags.time_limit) {
    // Under `muster run`, the limit is for all starts together.
    const auto supervisor = launch::supervisor();
    end_ = begin_ - (supervisor ? supervisor->used : std::nullopt).value_or(seconds(0)) + *flags.time_limit;
    return;
  }
  if (!asked_.note.empty()) log::debug(asked_.note);
  const auto warning = job_end_warning(::getenv, now);
  auto job_end = end_of_allocation(::getenv, now);
  if (!job_end) job_end = asked_.end;
  if (!job_end && !warning.empty()) log::warn(warning);
  // Ranks of other nodes may not have the variable, and only the job's first process has asked the batch system. The
  // first rank that knows the end sends the remaining time, and not the time of the end, since the clocks of nodes may
  // differ.
  const auto left = job_end ? std::to_string(std::chrono::ceil<seconds>(*job_end - now).count()) : "";
  const auto all = ranks.all_gather(left);
  const auto known = std::ranges::find_if(all, [](const auto& seconds) { return !seconds.empty(); });
  if (known != all.end()) end_ = steady_clock::now() + seconds(std::stoll(*known));
}

std::optional<std::chrono::duration<double>> LaunchEnd::time_left() const noexcept {
  if (!end_) return {};
  return *end_ - steady_clock::now();
}

}  // namespace muster::detail::launch
