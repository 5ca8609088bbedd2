#include "supervise/launch_command.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "supervise/lost_hosts.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

namespace muster::detail::supervise {
namespace {

/// An entry of --hosts, such as "root@n2:4".
struct Host {
  std::string name, user = {}, entry = {};  ///< name: root@n2, user: root, entry: n2:4
  int slots = 1;
};

/// Parses "n1, root@n2:4" and leaves out the lost hosts. If the number of slots is not a number, it counts as 0.
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
    if (colon != std::string::npos) slots = parse_number<int>(entry.substr(colon + 1)).value_or(0);
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

[[noreturn]] void refuse(const std::string& fact, const std::string& remedy) {
  throw Error(ExitCode::usage, "starting the ranks", fact, remedy);
}

}  // namespace

bool names_several_programs(const SuperviseOptions& options) {
  return !options.command.empty() && options.command.front() == "-n";
}

std::vector<Program> programs_of(const SuperviseOptions& options) {
  constexpr const char* form = "Write it as in muster run -- -n 6 ./heat : -n 2 ./train";
  if (!names_several_programs(options)) {
    if (std::ranges::find(options.command, ":") != options.command.end())
      refuse("the command has a \":\", which launchers take for the end of a program", form);
    return {{options.command}};
  }
  std::vector<Program> programs;
  for (auto word = options.command.begin();;) {
    const auto end = std::find(word, options.command.end(), ":");
    if (end - word < 3 || *word != "-n" || word[2].empty() || word[2].starts_with("-"))
      refuse("a program of several is named without -n and its number of ranks", form);
    programs.push_back({{word + 2, end}, parse_number<int>(word[1]).value_or(0)});
    if (*programs.back().ranks < 1)
      refuse("\"" + word[1] + "\" is not the number of ranks of " + word[2], "Give each program 1 or more");
    if (end == options.command.end()) return programs;
    word = end + 1;
  }
}

SuperviseOptions with_ranks_of_programs(SuperviseOptions options) {
  const auto programs = programs_of(options);
  if (!names_several_programs(options)) return options;
  if (options.ranks || options.min_workers)
    refuse(
        str(options.ranks ? "--ranks" : "--min-workers", " is given for several programs, each of which has its own"),
        "Leave it out; several programs start with the same ranks each time");
  options.ranks = 0;
  for (const auto& program : programs) *options.ranks += *program.ranks;
  return options;
}

std::string short_name(const std::string& host) {
  auto name = host.substr(host.find('@') + 1);
  in_addr address{};
  if (::inet_pton(AF_INET, name.c_str(), &address) == 1) return name;
  name.resize(std::min(name.find('.'), name.size()));
  for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string hosts_of_slots(const std::string& text) {
  std::vector<std::pair<std::string, int>> hosts;
  std::istringstream lines(text);
  for (std::string name; lines >> name;) {
    const auto known = std::ranges::find(hosts, name, [](const auto& host) { return host.first; });
    known == hosts.end() ? hosts.emplace_back(name, 1).second : ++known->second;
  }
  std::vector<std::string> entries;
  for (const auto& [name, slots] : hosts) entries.push_back(str(name, ":", slots));
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
    if (!options.ranks) options.ranks = slots_of(hosts_in(hosts)) - options.spares;
    if (hosts.find(',') != std::string::npos) options.hosts = hosts;
    return options;
  }
  return options;
}

int all_slots(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher) {
  if (!options.hosts.empty()) return slots_of(hosts_in(options.hosts));
  const int tasks = launcher.tasks(environment);
  return tasks > 0 ? tasks : cores;
}

int wanted_ranks(const SuperviseOptions& options, const Environment& environment, int cores, const Launcher& launcher) {
  return options.ranks ? *options.ranks : all_slots(options, environment, cores, launcher) - options.spares;
}

int ranks_without(const Hosts& lost, const SuperviseOptions& options, int ranks, const Environment& environment,
                  const Launcher& launcher) {
  if (launcher.uses_daemons()) {
    const int nodes = launcher.nodes(environment), left = nodes - static_cast<int>(lost.size());
    const int slots = std::max(ranks, launcher.tasks(environment));
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
  // In a Slurm job, mpirun starts its daemons through Slurm, not ssh. The user may have set another program than ssh.
  const auto is_set = [&](const char* name) { return environment(name) != nullptr; };
  return !is_set("SLURM_JOB_ID") && std::ranges::none_of(login_variables, is_set) &&
         !other_hosts(options, here).empty();
}

void check(const SuperviseOptions& options, int ranks, int slots, const Environment& environment,
           const Launcher& launcher, const std::string& here) {
  if (options.command.empty() || options.command.front().empty())
    refuse("no program is named", "Write it behind --, as in muster run -n 2 -- ./fit");
  const auto is_several = [&](const char* size) { return std::atoi(value_of(size, environment).c_str()) > 1; };
  if (is_several("OMPI_COMM_WORLD_SIZE") || is_several("PMI_SIZE"))
    refuse("a launcher has started this program", "Start it without a launcher; it starts the ranks itself");
  if (names_several_programs(options) && launcher.uses_daemons())
    refuse(launcher.program + " starts several programs only when it is called by hand",
           "Write srun --multi-prog, or give --hosts, for which mpirun starts them");
  if (!options.hosts.empty() && hosts_in(options.hosts).empty())
    refuse("--hosts \"" + options.hosts + "\" names no host", "Name them with their slots, as in n1:4,n2:4");
  for (const auto& host : hosts_in(options.hosts))
    if (host.name.find_first_of("/ \t") != std::string::npos || host.name.starts_with("-") ||
        host.entry.starts_with(":"))
      refuse("\"" + host.name + "\" in --hosts is not the name of a host",
             "Name the hosts with their slots, as in n1:4,n2:4");
  const auto others = other_hosts(options, here);
  std::set<std::string> users;  // contains an empty name if one of the hosts is named without a user
  for (const auto& host : hosts_in(options.hosts))
    if (!host.user.empty() || others.contains(host.name)) users.insert(host.user);
  if (users.size() > 1)
    refuse("--hosts names several users, or one for some hosts only, and the launcher logs in to all of them as one",
           "Write root@n1:4,root@n2:4, or leave the users out and name them in ~/.ssh/config");
  for (const auto& host : hosts_in(options.hosts))
    if (host.slots < 1)
      refuse("\"" + host.entry + "\" in --hosts has no number of slots behind the colon",
             "Name the hosts with 1 slot or more, as in n1:4,n2:4");
  if (ranks < 1) refuse(str(ranks, " is not a number of ranks"), "Ask for 1 or more");
  if (options.spares < 0 || (options.spares > 0 && ranks + options.spares > slots))
    refuse(str(counted(ranks, "rank"), " and ", counted(options.spares, "spare"),
               " are asked for, and there is room for ", slots),
           "Name more hosts, or ask for fewer");
  const auto hosts = hosts_in(options.hosts).size();
  if (options.spares > 0 && (options.hosts.empty() ? launcher.nodes(environment) : static_cast<int>(hosts)) < 2)
    refuse(str("--spares is ", options.spares, " on a single host, whose loss they cannot make good"),
           "Name several in --hosts, or leave it away");
  const int least = options.min_workers.value_or(1);
  if (least < 1 || least > ranks)
    refuse(str("--min-workers is ", least, " of ", counted(ranks, "rank")), "Give it from 1 to the number of ranks");
  if (options.max_failures.value_or(0) < -1)
    refuse(str("--max-failures is ", *options.max_failures), "Give a number, or -1 for no limit");
}

LaunchCommand launch_command(const FoundLauncher& launcher, const SuperviseOptions& options, int ranks,
                             const Hosts& lost, const SupervisorInfo& supervisor_info, const Folders& folders,
                             const Environment& environment, const std::vector<std::string>& flag_variables) {
  namespace variable = launch::variable;
  Variables told{
      {variable::supervised, "1"}, {variable::id, supervisor_info.id}, {variable::started, supervisor_info.started}};
  if (supervisor_info.used) told.emplace_back(variable::used, std::to_string(supervisor_info.used->count()));
  if (supervisor_info.job_end > 0) told.emplace_back(variable::job_end, std::to_string(supervisor_info.job_end));
  if (options.max_failures) told.emplace_back(variable::max_failures, std::to_string(*options.max_failures));
  if (supervisor_info.full_worker_count > 0)
    told.emplace_back(variable::full_worker_count, std::to_string(supervisor_info.full_worker_count));

  Start start{.options = options,
              .environment = environment,
              .mpi = launcher.mpi,
              .ranks = ranks,
              .lost = lost,
              .folders = folders};
  for (const auto& host : hosts_in(options.hosts, lost)) {
    start.hosts.push_back(host.entry);
    if (!host.user.empty()) start.user = host.user;
  }
  // All ranks take their flags from rank 0, which may be on another host. mpirun refuses a variable that is given
  // twice.
  for (const auto& [name, value] : told) start.passed_variables.push_back(name);
  for (const auto& name : flag_variables)
    if (std::ranges::find(start.passed_variables, name) == start.passed_variables.end())
      start.passed_variables.push_back(name);

  LaunchCommand command{.words = {launcher.path.string()}, .environment = {}};
  for (const auto& program : programs_of(options)) {
    if (start.is_further_program) command.words.push_back(":");
    start.ranks = program.ranks.value_or(ranks);
    for (const auto& words : {launcher.kind.words(start), program.command})
      command.words.insert(command.words.end(), words.begin(), words.end());
    start.is_further_program = true;
  }
  start.ranks = ranks;
  for (const auto& [name, value] : launcher.kind.settings(start)) {
    const char* const given = environment(name.c_str());
    if (given != nullptr && !value.starts_with("-l ")) continue;
    // The login names from --hosts ("-l NAME") must come before the arguments for ssh that the variable has already.
    command.environment.emplace_back(name, given == nullptr ? value : value + " " + given);
  }
  command.environment.insert(command.environment.end(), told.begin(), told.end());
  return command;
}

}  // namespace muster::detail::supervise
