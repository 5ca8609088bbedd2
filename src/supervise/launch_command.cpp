#include "supervise/launch_command.hpp"

#include "base/listed.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

namespace muster::detail::supervise {
namespace {

int number_in(const Environment& environment, const char* name) {
  const char* const value = environment(name);
  return value == nullptr ? 0 : std::atoi(value);
}

/// "root@n2:4"
struct Host {
  std::string name, user = {}, entry = {};  ///< root@n2, root, n2:4
  int slots = 1;
};

/// Parses "n1, root@n2:4" and leaves out the lost hosts. What is not a number of slots counts as 0.
std::vector<Host> hosts_in(const std::string& text, const Hosts& lost = {}) {
  std::vector<Host> hosts;
  std::istringstream list(text);
  for (std::string entry; std::getline(list, entry, ',');) {
    entry.erase(0, std::min(entry.find_first_not_of(" \t"), entry.size()));
    entry.erase(entry.find_last_not_of(" \t") + 1);
    const auto colon = entry.find(':'), at = entry.find('@');
    const auto name = entry.substr(0, colon);
    const bool has_user = at < colon && at != entry.npos;
    const auto is_this = [&](const std::string& other) { return short_name(other) == short_name(name); };
    if (name.empty() || std::ranges::any_of(lost, is_this)) continue;
    int slots = 1;
    if (colon != std::string::npos) {
      const auto* const end = entry.data() + entry.size();
      const auto parsed = std::from_chars(entry.data() + colon + 1, end, slots);
      if (parsed.ec != std::errc() || parsed.ptr != end) slots = 0;
    }
    hosts.push_back({.name = name,
                     .user = has_user ? entry.substr(0, at) : "",
                     .entry = has_user ? entry.substr(at + 1) : entry,
                     .slots = slots});
  }
  return hosts;
}

int slots_of(const std::vector<Host>& hosts) {
  int slots = 0;
  for (const auto& host : hosts) slots += host.slots;
  return slots;
}

/// A variable of this Slurm job; of a heterogeneous job that of each component, as SLURM_NTASKS_HET_GROUP_1.
std::vector<std::string> in_components(const Environment& environment, const std::string& name) {
  std::vector<std::string> values;
  const int components = number_in(environment, "SLURM_HET_SIZE");
  for (int i = 0; i < std::max(components, 1); ++i) {
    const char* const value = environment((components > 0 ? name + "_HET_GROUP_" + std::to_string(i) : name).c_str());
    values.emplace_back(value == nullptr ? "" : value);
  }
  return values;
}

/// How many tasks of `size` CPUs there is room for on the nodes of "2(x3),4": with one CPU each 10.
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

int nodes_of_job(const Environment& environment) {
  int nodes = 0;
  for (const auto& value : in_components(environment, "SLURM_JOB_NUM_NODES")) nodes += std::atoi(value.c_str());
  return nodes;
}

/// The tasks of each component of the Slurm job, or else those that its CPUs are enough for where it has several nodes;
/// 0 if they are not known.
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

/// The nodes of a Slurm job that so many ranks take, of those that are not lost.
int nodes_for(int ranks, const Hosts& lost, const SuperviseOptions& options, const Environment& environment) {
  const int all = nodes_of_job(environment), left = all - static_cast<int>(lost.size());
  // Where the job has no number of tasks, the ranks that are asked for are spread over its nodes, however few they are.
  const auto given = in_components(environment, "SLURM_NTASKS");
  const bool has_tasks = std::ranges::any_of(given, [](const auto& text) { return !text.empty(); });
  const int tasks = options.ranks && !has_tasks ? *options.ranks + options.spares : all_tasks_of_job(environment);
  const int on_each = std::max(1, tasks / std::max(1, all));
  return std::min(left, (ranks + on_each - 1) / on_each);
}

/// True if a name fits "n[1-3,08]"; the numbers are compared with their leading zeros.
bool fits(const std::string& name, const std::string& pattern) {
  const auto open = std::min(pattern.find('['), pattern.size()), close = pattern.find(']');
  if (!name.starts_with(pattern.substr(0, open))) return false;
  if (close == std::string::npos) return name == pattern;
  const auto by_size = [](const std::string& number) { return std::pair(number.size(), number); };
  const auto end = std::min(name.find_first_not_of("0123456789", open), name.size());
  const auto number = by_size(name.substr(open, end - open));
  std::istringstream ranges(pattern.substr(open + 1, close - open - 1));
  for (std::string range; std::getline(ranges, range, ',');)
    if (by_size(range.substr(0, range.find('-'))) <= number && number <= by_size(range.substr(range.find('-') + 1)))
      return fits(name.substr(end), pattern.substr(close + 1));
  return false;
}

/// True if Slurm's list of nodes, as "n[1-3,08],m5", has this one.
bool has_node(const std::string& list, const std::string& node) {
  std::string pattern;
  bool in_brackets = false;
  for (const char c : list + ",") {
    if (c == '[' || c == ']') in_brackets = c == '[';
    if (c != ',' || in_brackets)
      pattern += c;
    else if (fits(node, std::exchange(pattern, {})))
      return true;
  }
  return false;
}

/// One start by srun for each component of a heterogeneous job that has ranks; otherwise `start` alone.
std::vector<Start> in_parts(const Start& start, const Environment& environment) {
  const auto tasks = tasks_of_job(environment);
  if (tasks.size() < 2) return {start};
  const auto nodes = in_components(environment, "SLURM_JOB_NUM_NODES");
  const auto names = in_components(environment, "SLURM_JOB_NODELIST");
  std::vector<Start> parts;
  int left = start.ranks;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    auto part = start;
    part.het_group = static_cast<int>(i);
    // srun refuses to leave out nodes of another component.
    std::erase_if(part.lost, [&](const auto& node) { return !has_node(names[i], node); });
    const int all = std::max(1, std::atoi(nodes[i].c_str())), lost = static_cast<int>(part.lost.size());
    part.ranks = std::min(left, tasks[i] * (all - lost) / all);
    part.nodes = lost == 0 ? 0 : std::min(all - lost, part.ranks);
    left -= part.ranks;
    if (part.ranks > 0) parts.push_back(std::move(part));
  }
  if (parts.empty()) return {start};
  parts.back().ranks += left;  // more are asked for than there are tasks
  return parts;
}

/// How many hosts the job has.
int number_of_hosts(const SuperviseOptions& options, const Environment& environment) {
  if (!options.hosts.empty()) return static_cast<int>(hosts_in(options.hosts).size());
  return environment("SLURM_JOB_ID") == nullptr ? 1 : nodes_of_job(environment);
}

}  // namespace

std::string short_name(const std::string& host) {
  auto name = host.substr(host.find('@') + 1);
  in_addr address{};
  if (::inet_pton(AF_INET, name.c_str(), &address) == 1) return name;
  name.resize(std::min(name.find('.'), name.size()));
  for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

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

Launcher::Kind launcher_kind(const SuperviseOptions& options, const Environment& environment, const std::string& mpi) {
  const auto is = [&](std::string_view name) { return mpi.find(name) != std::string::npos; };
  // Cray MPICH has no mpiexec of its own.
  const bool srun = number_of_hosts(options, environment) > 1 || is("CRAY");
  if (environment("SLURM_JOB_ID") != nullptr && options.hosts.empty() && srun) return Launcher::Kind::srun;
  return is("MPICH") || is("Intel") || is("MVAPICH") ? Launcher::Kind::hydra : Launcher::Kind::open_mpi;
}

int all_slots(const SuperviseOptions& options, const Environment& environment, int cores) {
  if (!options.hosts.empty()) return slots_of(hosts_in(options.hosts));
  const int tasks = environment("SLURM_JOB_ID") == nullptr ? 0 : all_tasks_of_job(environment);
  return tasks > 0 ? tasks : cores;
}

int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cores) {
  return options.ranks ? *options.ranks : all_slots(options, environment, cores) - options.spares;
}

int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment,
                  Launcher::Kind launcher) {
  if (launcher == Launcher::Kind::srun) {
    const int nodes = nodes_of_job(environment), left = nodes - static_cast<int>(lost.size());
    const int slots = std::max(ranks, all_tasks_of_job(environment));
    return nodes > 0 ? std::min(ranks, static_cast<int>(std::int64_t{slots} * left / nodes)) : ranks;
  }
  const int all = slots_of(hosts_in(options.hosts)), left = slots_of(hosts_in(options.hosts, lost));
  if (all == 0) return ranks;
  return ranks <= all ? std::min(ranks, left) : static_cast<int>(std::int64_t{ranks} * left / all);
}

std::string name_in_hosts(const SuperviseOptions& options, const std::string& host) {
  for (const auto& one : hosts_in(options.hosts))
    if (short_name(one.name) == short_name(host)) return one.name;
  return host;
}

Hosts other_hosts(const SuperviseOptions& options, const std::string& here) {
  Hosts others;
  for (const auto& host : hosts_in(options.hosts))
    if (const auto name = short_name(host.name);
        name != "localhost" && !name.starts_with("127.") && name != short_name(here))
      others.insert(host.name);
  return others;
}

bool leaves_this_host(const SuperviseOptions& options, const std::string& here, const Environment& environment) {
  // In a Slurm job, mpirun starts its daemons through Slurm. The user may have set another program than ssh.
  for (const auto* name : {"SLURM_JOB_ID", "OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC"})
    if (environment(name) != nullptr) return false;
  return !other_hosts(options, here).empty();
}

void check(const SuperviseOptions& options, int ranks, int slots, const Environment& environment,
           const std::string& here) {
  const auto refuse = [](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::usage, "starting the ranks", fact, remedy);
  };
  if (options.command.empty() || options.command.front().empty())
    refuse("no program is named", "Write it behind --, as in muster run -n 2 -- ./fit");
  if (number_in(environment, "OMPI_COMM_WORLD_SIZE") > 1 || number_in(environment, "PMI_SIZE") > 1)
    refuse("a launcher has started this program", "Start it without a launcher; it starts the ranks itself");
  if (!options.hosts.empty() && hosts_in(options.hosts).empty())
    refuse("--hosts \"" + options.hosts + "\" names no host", "Name them with their slots, as in n1:4,n2:4");
  for (const auto& host : hosts_in(options.hosts))
    if (host.name.find_first_of("/ \t") != std::string::npos || host.name.starts_with("-") ||
        host.entry.starts_with(":"))
      refuse("\"" + host.name + "\" in --hosts is not the name of a host",
             "Name the hosts with their slots, as in n1:4,n2:4");
  const auto others = other_hosts(options, here);
  std::set<std::string> users;  // an empty one where another host is named without
  for (const auto& host : hosts_in(options.hosts))
    if (!host.user.empty() || others.contains(host.name)) users.insert(host.user);
  if (users.size() > 1)
    refuse("--hosts names several users, or one for some hosts only, and the launcher logs in to all of them as one",
           "Write root@n1:4,root@n2:4, or leave the users out and name them in ~/.ssh/config");
  for (const auto& host : hosts_in(options.hosts))
    if (host.slots < 1)
      refuse("\"" + host.entry + "\" in --hosts has no number of slots behind the colon",
             "Name the hosts with 1 slot or more, as in n1:4,n2:4");
  if (ranks < 1) refuse(std::to_string(ranks) + " is not a number of ranks", "Ask for 1 or more");
  if (options.spares < 0 || (options.spares > 0 && ranks + options.spares > slots))
    refuse(counted(ranks, "rank") + " and " + counted(options.spares, "spare") +
               " are asked for, and there is room for " + std::to_string(slots),
           "Name more hosts, or ask for fewer");
  if (options.spares > 0 && number_of_hosts(options, environment) < 2)
    refuse("--spares is " + std::to_string(options.spares) + " on a single host, whose loss they cannot make good",
           "Name several in --hosts, or leave it away");
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
  Variables told{
      {variable::supervised, "1"}, {variable::id, supervisor_info.id}, {variable::started, supervisor_info.started}};
  if (supervisor_info.used) told.emplace_back(variable::used, std::to_string(supervisor_info.used->count()));
  if (supervisor_info.job_end > 0) told.emplace_back(variable::job_end, std::to_string(supervisor_info.job_end));
  if (options.max_failures) told.emplace_back(variable::max_failures, std::to_string(*options.max_failures));
  if (supervisor_info.full_worker_count > 0)
    told.emplace_back(variable::full_worker_count, std::to_string(supervisor_info.full_worker_count));

  Start start{.ranks = ranks, .lost = lost, .folders = folders};
  if (!lost.empty() || options.spares > 0) start.nodes = nodes_for(ranks, lost, options, environment);
  for (const auto& host : hosts_in(options.hosts, lost)) {
    start.hosts.push_back(host.entry);
    if (!host.user.empty()) start.user = host.user;
  }
  // Rank 0, whose flags all ranks take, may be on another host. mpirun refuses a name that is given twice.
  for (const auto& [name, value] : told) start.passed_variables.push_back(name);
  for (const auto& name : flag_variables)
    if (std::ranges::find(start.passed_variables, name) == start.passed_variables.end())
      start.passed_variables.push_back(name);

  LaunchCommand command{.words = {launcher.path.string()}, .environment = {}};
  Variables settings;
  switch (launcher.kind) {
    case Launcher::Kind::open_mpi:
      open_mpi::add_words(command.words, launcher, start);
      settings = open_mpi::settings(launcher, start);
      break;
    case Launcher::Kind::hydra:
      hydra::add_words(command.words, launcher, start);
      settings = hydra::settings(launcher, start);
      break;
    case Launcher::Kind::srun:
      for (const auto& part : in_parts(start, environment)) {
        if (command.words.size() > 1) {  // behind another part
          command.words.insert(command.words.end(), options.command.begin(), options.command.end());
          command.words.push_back(":");
        }
        srun::add_words(command.words, launcher, part);
      }
      settings = srun::settings(launcher, start);
      // srun does not take it from the job by itself, and refuses ranks that it leaves no room for.
      if (const char* const cpus = environment("SLURM_CPUS_PER_TASK");
          cpus != nullptr && number_in(environment, "SLURM_HET_SIZE") < 2 && ranks <= all_tasks_of_job(environment))
        settings.emplace_back("SRUN_CPUS_PER_TASK", cpus);
      break;
  }
  command.words.insert(command.words.end(), options.command.begin(), options.command.end());
  for (auto& [name, value] : settings) {
    const char* const given = environment(name.c_str());
    if (given != nullptr && !value.starts_with("-l ")) continue;
    // The user that --hosts names comes before the arguments of ssh that are set.
    command.environment.emplace_back(name, given == nullptr ? value : value + " " + given);
  }
  command.environment.insert(command.environment.end(), told.begin(), told.end());
  return command;
}

}  // namespace muster::detail::supervise
