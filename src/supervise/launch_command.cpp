#include "supervise/launch_command.hpp"

#include "base/listed.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

namespace muster::detail::supervise {
namespace {

int number_in(const Environment& environment, const char* name) {
  const char* const value = environment(name);
  return value == nullptr ? 0 : std::atoi(value);
}

struct Host {
  std::string name, entry;
  int slots = 1;
};

/// Launchers name a host by its first label: "n1" for n1.cluster. Addresses stay whole.
std::string short_name(const std::string& host) {
  in_addr address{};
  return ::inet_pton(AF_INET, host.c_str(), &address) == 1 ? host : host.substr(0, host.find('.'));
}

/// Parses "n1,n2:4" and leaves out the lost hosts. What is not a number of slots counts as 0.
std::vector<Host> hosts_in(const std::string& text, const Hosts& lost = {}) {
  std::vector<Host> hosts;
  std::istringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    const auto colon = entry.find(':');
    const auto name = entry.substr(0, colon);
    const auto is_this = [&](const std::string& other) { return short_name(other) == short_name(name); };
    if (name.empty() || std::ranges::any_of(lost, is_this)) continue;
    int slots = 1;
    if (colon != std::string::npos) {
      const auto* const end = entry.data() + entry.size();
      const auto parsed = std::from_chars(entry.data() + colon + 1, end, slots);
      if (parsed.ec != std::errc() || parsed.ptr != end) slots = 0;
    }
    hosts.push_back({name, entry, slots});
  }
  return hosts;
}

int slots_of(const std::vector<Host>& hosts) {
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  return slots;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

}  // namespace

std::string hosts_of_slots(const std::string& text) {
  std::vector<std::pair<std::string, int>> hosts;
  std::istringstream lines(text);
  for (std::string name; lines >> name;) {
    const auto known = std::ranges::find(hosts, name, [](const auto& host) { return host.first; });
    known == hosts.end() ? hosts.emplace_back(name, 1).second : ++known->second;
  }
  std::vector<std::string> entries;
  for (const auto& [name, slots] : hosts) entries.push_back(name + ":" + std::to_string(slots));
  return joined(entries);
}

SuperviseOptions with_hosts_of_job(SuperviseOptions options, const Environment& environment) {
  if (!options.hosts.empty() || environment("SLURM_JOB_ID") != nullptr) return options;
  for (const char* const variable : {"PBS_NODEFILE", "LSB_DJOB_HOSTFILE"}) {
    const char* const file = environment(variable);
    if (file == nullptr) continue;
    std::ifstream in(file);
    const auto hosts = hosts_of_slots(std::string(std::istreambuf_iterator<char>(in), {}));
    if (hosts.empty()) continue;
    if (!options.ranks) options.ranks = slots_of(hosts_in(hosts));
    if (hosts.find(',') != std::string::npos) options.hosts = hosts;
    return options;
  }
  return options;
}

Launcher::Kind launcher_kind(const SuperviseOptions& options, const Environment& environment) {
  const bool several = environment("SLURM_JOB_ID") != nullptr && number_in(environment, "SLURM_JOB_NUM_NODES") > 1;
  return several && options.hosts.empty() ? Launcher::Kind::srun : Launcher::Kind::mpirun;
}

int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cpus) {
  if (options.ranks) return *options.ranks;
  if (!options.hosts.empty()) return slots_of(hosts_in(options.hosts));
  const int tasks = environment("SLURM_JOB_ID") == nullptr ? 0 : number_in(environment, "SLURM_NTASKS");
  return tasks > 0 ? tasks : cpus;
}

int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment) {
  const bool slurm = launcher_kind(options, environment) == Launcher::Kind::srun;
  const int all = slurm ? number_in(environment, "SLURM_JOB_NUM_NODES") : slots_of(hosts_in(options.hosts));
  const int left = slurm ? all - static_cast<int>(lost.size()) : slots_of(hosts_in(options.hosts, lost));
  if (!slurm && ranks <= all) return std::min(ranks, left);
  return all > 0 ? static_cast<int>(std::int64_t{ranks} * left / all) : ranks;
}

bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment) {
  // In a Slurm job, mpirun starts its daemons through Slurm. The user may have set another program than ssh.
  if (environment("SLURM_JOB_ID") != nullptr || environment("OMPI_MCA_plm_rsh_agent") != nullptr) return false;
  return std::ranges::any_of(hosts_in(options.hosts), [&](const Host& host) {
    return host.name != "localhost" && !host.name.starts_with("127.") && short_name(host.name) != short_name(here);
  });
}

void check(const SuperviseOptions& options, int ranks, const Environment& environment) {
  const auto refuse = [](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::usage, "starting the ranks", fact, remedy);
  };
  if (options.command.empty()) refuse("no program is named", "Write it behind --, as in muster run -n 2 -- ./fit");
  if (number_in(environment, "OMPI_COMM_WORLD_SIZE") > 1 || number_in(environment, "PMI_SIZE") > 1)
    refuse("a launcher has started this program", "Start it without a launcher; it starts the ranks itself");
  if (!options.hosts.empty() && hosts_in(options.hosts).empty())
    refuse("--hosts \"" + options.hosts + "\" names no host", "Name them with their slots, as in n1:4,n2:4");
  for (const auto& host : hosts_in(options.hosts))
    if (host.slots < 1)
      refuse("\"" + host.entry + "\" in --hosts has no number of slots behind the colon",
             "Name the hosts with 1 slot or more, as in n1:4,n2:4");
  if (ranks < 1) refuse(std::to_string(ranks) + " is not a number of ranks", "Ask for 1 or more");
  const int least = options.min_workers.value_or(1);
  if (least < 1 || least > ranks)
    refuse("--min-workers is " + std::to_string(least) + " of " + counted(ranks, "rank"),
           "Give it from 1 to the number of ranks");
  if (options.max_failures.value_or(0) < -1)
    refuse("--max-failures is " + std::to_string(*options.max_failures), "Give a number, or -1 for no limit");
}

LaunchCommand launch_command(const Launcher& launcher, const SuperviseOptions& options, int ranks, const Hosts& lost,
                             const SupervisorInfo& supervisor_info, const Folders& folders,
                             const Environment& environment, const std::vector<std::string>& flag_variables) {
  namespace variable = launch::variable;
  const bool mpirun = launcher.kind == Launcher::Kind::mpirun;
  LaunchCommand command{.words = {launcher.path.string()}, .environment = {}};
  auto& words = command.words;
  std::vector<std::pair<std::string, std::string>> told{
      {variable::supervised, "1"}, {variable::id, supervisor_info.id}, {variable::started, supervisor_info.started}};
  if (supervisor_info.begin > 0) told.emplace_back(variable::begin, std::to_string(supervisor_info.begin));
  if (supervisor_info.job_end > 0) told.emplace_back(variable::job_end, std::to_string(supervisor_info.job_end));
  if (options.max_failures) told.emplace_back(variable::max_failures, std::to_string(*options.max_failures));
  if (supervisor_info.full_worker_count > 0)
    told.emplace_back(variable::full_worker_count, std::to_string(supervisor_info.full_worker_count));

  // When a rank has failed, Job::end() has the others killed at once. --kill-on-bad-exit would send SIGTERM, by which
  // Slurm asks ranks to save, and SIGKILL only after KillWait, 30 s by default.
  if (!mpirun) words.insert(words.end(), {"--mpi=pmix", "--kill-on-bad-exit=0"});
  if (!mpirun && !lost.empty()) {
    // Without the number, srun asks for as many nodes as the job has.
    const int nodes = number_in(environment, "SLURM_JOB_NUM_NODES") - static_cast<int>(lost.size());
    words.insert(words.end(), {"--exclude=" + joined({lost.begin(), lost.end()}), "--nodes=" + std::to_string(nodes)});
  }
  words.insert(words.end(), {"-n", std::to_string(ranks)});
  if (mpirun && !options.hosts.empty()) {
    std::vector<std::string> entries;
    for (const auto& host : hosts_in(options.hosts, lost)) entries.push_back(host.entry);
    words.insert(words.end(), {"--host", joined(entries)});
    for (const auto& [name, value] : told) words.insert(words.end(), {"-x", name});
    // Rank 0, whose flags all ranks take, may be on another host. mpirun refuses a name that is given twice.
    for (const auto& name : flag_variables)
      if (std::ranges::find(told, name, [](const auto& one) { return one.first; }) == told.end())
        words.insert(words.end(), {"-x", name});
  }
  words.insert(words.end(), options.command.begin(), options.command.end());

  // Settings of Open MPI, which other launchers ignore: run as root too, allow more ranks than cores, do not bind, and
  // when the first rank ends, end the others at once. Settings that the user has made are kept.
  std::vector<std::pair<std::string, std::string>> settings{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                            {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                                            {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                                            {"OMPI_MCA_hwloc_base_binding_policy", "none"},
                                                            {"OMPI_MCA_odls_base_sigkill_timeout", "0"}};
  if (mpirun && options.hosts.empty()) {
    settings.emplace_back("OMPI_MCA_orte_tmpdir_base", folders.temporary.string());
    if (!folders.shared_memory.empty())
      settings.emplace_back("OMPI_MCA_btl_vader_backing_directory", folders.shared_memory.string());
  }
  for (auto& setting : settings)
    if (environment(setting.first.c_str()) == nullptr) command.environment.push_back(std::move(setting));
  command.environment.insert(command.environment.end(), told.begin(), told.end());
  return command;
}

}  // namespace muster::detail::supervise
