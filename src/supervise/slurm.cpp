#include "supervise/slurm.hpp"

#include "base/program.hpp"
#include "base/text.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

namespace muster::detail::supervise {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// Timeout for Slurm's programs, which otherwise wait for minutes for a controller that does not answer.
constexpr auto tool_limit = 3s;
/// Timeout for queueing a job again; longer, since nothing else is left to do then.
constexpr auto requeue_limit = 60s;
/// How long to wait for a step to end.
constexpr auto end_limit = 2s;

/// Returns the IDs ("12.0") of the steps that these srun processes have started; none if Slurm does not answer. Each
/// line of scontrol describes a step: "StepId=12.0 … SrunHost:Pid=n1:4711".
std::optional<std::vector<std::string>> steps_of(const std::set<pid_t>& sruns, const std::string& host) {
  const char* const job = std::getenv("SLURM_JOB_ID");
  if (job == nullptr) return {};
  const auto text = output_of({"scontrol", "--oneliner", "show", "step", job}, tool_limit);
  if (!text) return {};
  constexpr std::string_view id_key = "StepId=", srun_key = "SrunHost:Pid=";
  std::vector<std::string> steps;
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    std::string id, srun;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (word.starts_with(id_key)) id = word.substr(id_key.size());
      if (word.starts_with(srun_key)) srun = word.substr(srun_key.size());
    }
    const bool started = !id.empty() && id.back() >= '0' && id.back() <= '9';  // not "12.TBD", which waits for CPUs
    const auto is_this = [&](pid_t pid) { return srun == str(host, ":", pid); };
    if (started && std::ranges::any_of(sruns, is_this)) steps.push_back(id);
  }
  return steps;
}

/// Returns how many tasks of `size` CPUs fit on the nodes in `text`: 10 for "2(x3),4" and one CPU each.
int tasks_on_nodes(const std::string& text, int size) {
  int sum = 0;
  std::istringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    int count = 0, times = 1;
    std::sscanf(entry.c_str(), "%d(x%d)", &count, &times);
    sum += count / size * times;
  }
  return sum;
}

bool kill_all(std::vector<std::string> steps) {
  steps.insert(steps.begin(), {"scancel", "--quiet", "--signal=KILL"});
  return output_of(std::move(steps), tool_limit).has_value();
}

}  // namespace

std::vector<std::string> in_components(const Environment& environment, const std::string& name) {
  std::vector<std::string> values;
  const int components = std::atoi(value_of("SLURM_HET_SIZE", environment).c_str());
  for (int i = 0; i < std::max(components, 1); ++i)
    values.push_back(value_of(components > 0 ? str(name, "_HET_GROUP_", i) : name, environment));
  return values;
}

int nodes_of_job(const Environment& environment) {
  int nodes = 0;
  for (const auto& value : in_components(environment, "SLURM_JOB_NUM_NODES")) nodes += std::atoi(value.c_str());
  return nodes;
}

std::vector<int> tasks_of_job(const Environment& environment) {
  const auto tasks = in_components(environment, "SLURM_NTASKS");
  const auto cpus = in_components(environment, "SLURM_JOB_CPUS_PER_NODE");
  const auto of_task = in_components(environment, "SLURM_CPUS_PER_TASK");
  const bool is_spread = nodes_of_job(environment) > 1;
  std::vector<int> all;
  for (std::size_t i = 0; i < tasks.size(); ++i)
    all.push_back(!tasks[i].empty() ? std::atoi(tasks[i].c_str())
                  : is_spread       ? tasks_on_nodes(cpus[i], std::max(1, std::atoi(of_task[i].c_str())))
                                    : 0);
  return all;
}

int all_tasks_of_job(const Environment& environment) {
  const auto tasks = tasks_of_job(environment);
  return std::accumulate(tasks.begin(), tasks.end(), 0);
}

bool end_steps(const std::set<pid_t>& sruns, const std::string& host) {
  for (const auto until = Clock::now() + end_limit;;) {
    auto steps = steps_of(sruns, host.substr(0, host.find('.')));
    if (steps && steps->empty()) return true;
    if (!steps || !kill_all(std::move(*steps)) || Clock::now() >= until) return false;
    std::this_thread::sleep_for(100ms);
  }
}

std::set<std::string> nodes_out_of_service(const std::string& text) {
  std::set<std::string> nodes;
  std::istringstream lines(text);
  for (std::string node, state; lines >> node >> state;)
    for (const std::string_view out : {"drain", "drng", "down", "fail"})
      if (state.starts_with(out)) nodes.insert(node);
  return nodes;
}

std::set<std::string> nodes_out_of_service() {
  const char* const nodes = std::getenv("SLURM_JOB_NODELIST");
  if (nodes == nullptr) return {};
  const auto text = output_of({"sinfo", "--noheader", "--Node", "--format=%N %t", str("--nodes=", nodes)}, tool_limit);
  return text ? nodes_out_of_service(*text) : std::set<std::string>();
}

bool requeue(const std::string& job) { return output_of({"scontrol", "requeue", job}, requeue_limit).has_value(); }

}  // namespace muster::detail::supervise
