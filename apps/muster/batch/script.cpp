#include "script.hpp"

#include "base/duration.hpp"
#include "base/text.hpp"

#include <algorithm>
#include <cctype>
#include <filesystem>

namespace muster::tool {
namespace {

using std::chrono::seconds;

constexpr seconds least_lead{60}, usual_lead{120};

int ranks_per_node(const BatchOptions& options) {
  return options.ranks_per_node.value_or(options.gpus > 0 ? options.gpus : 2);
}

/// Returns "HH:MM:SS", which both batch systems accept.
std::string time_text(seconds time) {
  const auto all = static_cast<long long>(time.count());
  return detail::formatted("%02lld:%02lld:%02lld", all / 3600, all / 60 % 60, all % 60);
}

std::string name_of_program(const BatchOptions& options) {
  return std::filesystem::path(options.command.front()).filename().string();
}

/// Returns the job's name; other characters than those that batch systems accept become "_".
std::string job_name(const BatchOptions& options) {
  auto name = !options.name.empty() ? options.name : flag_in(options.command, "--name").value_or("");
  if (name.empty()) name = name_of_program(options);
  for (auto& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '_' && c != '-' && c != '.') c = '_';
  return name;
}

/// Returns the words of the program behind "--". `unique`: appended to make the name of a run unique; empty if muster
/// itself chooses the run's name.
std::string program_words(const BatchOptions& options, const std::string& unique) {
  std::string text;
  for (const auto& word : options.command) text += " " + shell_word(word);
  if (!options.storage.empty() && !flag_in(options.command, "--storage"))
    text += " --storage " + shell_word(options.storage);
  if (flag_in(options.command, "--name")) return text;
  if (!options.name.empty()) return text + " --name " + shell_word(options.name);
  return unique.empty() ? text : text + " --name " + shell_word(name_of_program(options)) + "_\"" + unique + "\"";
}

std::string head(const std::string& system, const std::string& submit, const BatchOptions& options) {
  return "#!/bin/bash\n# Trains in " + system + ". Submit it with: " + submit +
         " FILE\n# Written by: " + options.written_by + "\n";
}

std::string modules() {
  return "\n# Load the modules that the program was built with here: module load openmpi hdf5\n\n";
}

/// Returns a character as bash reads it in $'…'.
std::string escaped(char c) {
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  if (c == '\'' || c == '\\') return detail::str("\\", c);
  const auto byte = static_cast<unsigned char>(c);
  if (byte >= 0x20 && byte != 0x7f) return {c};
  return detail::formatted("\\%03o", byte);
}

/// Returns why signal_lead() returns its value, for a comment in the script.
std::string reason_of_lead(const BatchOptions& options) {
  if (signal_lead(options) < least_lead || signal_lead(options) * 2 == options.time) return "half of the job's time";
  if (!options.longest_save) return "no earlier run says how long a save takes";
  return detail::str("the longest save of the earlier run took ", options.longest_save->count(), " s");
}

}  // namespace

std::optional<seconds> parse_time(const std::string& text) {
  const auto time = detail::parse_clock(text, std::chrono::minutes(1));
  return time > seconds(0) ? time : std::nullopt;
}

std::string shell_word(const std::string& text) {
  const auto is_plain = [](unsigned char c) {
    return c < 0x80 && (std::isalnum(c) != 0 ||
                        std::string_view("_-./:,=+@%").find(static_cast<char>(c)) != std::string_view::npos);
  };
  if (!text.empty() && std::ranges::all_of(text, is_plain)) return text;
  // The word also appears in a comment of the script, which a line break would end; so control characters are escaped.
  const bool has_control = std::ranges::any_of(text, [](unsigned char c) { return std::iscntrl(c) != 0 && c < 0x80; });
  std::string word = has_control ? "$'" : "'";
  for (const char c : text) word += has_control ? escaped(c) : c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

std::optional<std::string> flag_in(const std::vector<std::string>& command, const std::string& flag) {
  std::optional<std::string> value;
  for (std::size_t i = 1; i < command.size(); ++i) {
    if (command[i].starts_with(flag + "=")) value = command[i].substr(flag.size() + 1);
    if (command[i] == flag && i + 1 < command.size()) value = command[i + 1];
  }
  return value;
}

seconds signal_lead(const BatchOptions& options) {
  const auto lead = options.longest_save ? std::max(3 * *options.longest_save + seconds(30), least_lead) : usual_lead;
  return std::min(lead, options.time / 2);
}

std::string slurm_script(const BatchOptions& options) {
  const auto ranks = ranks_per_node(options);
  const auto lead = std::to_string(signal_lead(options).count());
  auto text = head("Slurm", "sbatch", options);
  const auto line = [&](const std::string& option, auto value) {
    if constexpr (std::is_arithmetic_v<decltype(value)>)
      text += detail::str("#SBATCH --", option, "=", value, "\n");
    else
      text += "#SBATCH --" + option + "=" + value + "\n";
  };
  line("job-name", job_name(options));
  if (!options.queue.empty()) line("partition", options.queue);
  if (!options.account.empty()) line("account", options.account);
  line("nodes", options.nodes);
  text += "# Ranks of a node, and the cores of each rank: it computes with as many threads.\n";
  line("ntasks-per-node", ranks);
  line("cpus-per-task", options.cpus_per_rank);
  if (options.gpus > 0) {
    if (ranks == options.gpus) text += "# One for each rank.\n";
    line("gpus-per-node", options.gpus);
  }
  line("time", time_text(options.time));
  text += "# One file, in the folder of submission. The log of each rank is in the run's folder.\n";
  line("output", std::string(options.chain > 0 ? "%x-%A.out" : "%x-%j.out"));
  text +=
      "#SBATCH --open-mode=append\n"
      "# Slurm signals muster run so many seconds before the time limit: the ranks save, stop and end with code 85.\n"
      "# " +
      lead + " s: " + reason_of_lead(options) + ".\n";
  line("signal", "B:USR1@" + lead);
  if (options.chain > 0) {
    text +=
        "# A chain of jobs, for sites that do not queue a job again: they run one after the other, and each goes on\n"
        "# from what the one before has saved. When the run has finished, those that are left end at once; scancel\n"
        "# ends the whole chain.\n";
    line("array", detail::str("1-", options.chain, "%1"));
  } else {
    text +=
        "# Then muster run --requeue queues the job again, and it goes on from there. Slurm itself queues it again "
        "when\n"
        "# it is preempted or a node fails.\n"
        "#SBATCH --requeue\n";
  }
  if (options.nodes > 1)
    text +=
        "# A lost node does not end the job: muster run starts the ranks again on the nodes that are left.\n"
        "#SBATCH --no-kill\n";
  text += modules();
  if (options.nodes > 1 && options.cpus_per_rank > 1)
    text +=
        "# srun does not take --cpus-per-task from the job by itself.\n"
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n";
  // The ranks may use the time after the signal, except for some seconds that their launcher needs.
  const auto grace = std::to_string(std::max<seconds::rep>(signal_lead(options).count() - 10, 1));
  return text +
         "# exec, since Slurm's signals reach only the process of this script. --grace: how many seconds the ranks may "
         "take\n"
         "# to save after a signal.\nexec " +
         shell_word(options.tool) + " run" + (options.chain > 0 ? "" : " --requeue") + " --grace " + grace + " --" +
         program_words(options, options.chain > 0 ? "$SLURM_ARRAY_JOB_ID" : "") + "\n";
}

std::string pbs_script(const BatchOptions& options) {
  const auto ranks = ranks_per_node(options);
  auto text = head("PBS", "qsub", options) + "#PBS -N " + job_name(options) + "\n#PBS -S /bin/bash\n";
  if (!options.queue.empty()) text += "#PBS -q " + options.queue + "\n";
  if (!options.account.empty()) text += "#PBS -A " + options.account + "\n";
  text +=
      detail::str("# Nodes, and the cores", options.gpus > 0 ? ", ranks and GPUs" : " and ranks",
                  " of each.\n#PBS -l select=", options.nodes, ":ncpus=", ranks * options.cpus_per_rank,
                  ":mpiprocs=", ranks, options.gpus > 0 ? detail::str(":ngpus=", options.gpus) : std::string(), "\n");
  if (options.nodes > 1) text += "#PBS -l place=scatter\n";
  text +=
      "# muster run asks PBS when this time ends, and the ranks save, stop and end with code 85 before it.\n"
      "#PBS -l walltime=" +
      time_text(options.time) +
      "\n"
      "# Output and errors in one file. The log of each rank is in the run's folder.\n"
      "#PBS -j oe\n"
      "# PBS starts the job again after the failure of a node, and it goes on from its newest checkpoint.\n"
      "#PBS -r y\n";
  if (options.chain > 0)
    text += detail::str(
        "# A chain of jobs: they run one after the other (%1), and each goes on from what the one before has saved.\n"
        "# When the run has finished, those that are left end at once; qdel ends the whole chain.\n"
        "#PBS -J 1-",
        options.chain, "%1\n");
  else
    text +=
        detail::str("# After code 85, submit this script again ",
                    options.name.empty() && !flag_in(options.command, "--name") ? "with a --name for the program " : "",
                    "to go on; muster pbs --chain N writes a script of N jobs.\n");
  return text + modules() +
         "cd \"$PBS_O_WORKDIR\" || exit\n# exec, since PBS signals the process of this script.\nexec " +
         shell_word(options.tool) + " run --" + program_words(options, "${PBS_JOBID%%[!0-9]*}") + "\n";
}

}  // namespace muster::tool
