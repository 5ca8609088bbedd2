#include "peers.hpp"

#include "base/temporary.hpp"
#include "programs.hpp"
#include "scripts.hpp"
#include "step_cases.hpp"

#include <muster/error.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace muster::bench {
namespace {

void write(const std::filesystem::path& path, const char* text) {
  std::ofstream file(path);
  if (!(file << text).flush())
    throw Error(ExitCode::retry, "writing " + path.string(), "the disk does not take it", "Name another with TMPDIR");
}

/// Returns the command with variables that set malloc as a Launch does.
Command with_malloc(Command command) {
  for (const auto& [name, value] :
       {std::pair{"MALLOC_MMAP_MAX_", "0"}, {"MALLOC_TRIM_THRESHOLD_", "2000000000"}, {"MALLOC_TOP_PAD_", "67108864"}})
    command.environment.emplace_back(name, value);
  return command;
}

double step_ms(const Finished&, const nlohmann::ordered_json& result) { return result.at("step_ms"); }

/// Adds a program with a loop of its own, which has no Launch: as it is, and with a Launch's settings of malloc.
void add_own_loop_with_malloc(Row& row, int ranks, const std::string& steps, const Measurement& measurement) {
  auto own_loop = on_ranks(ranks, {"job", "own-loop", row.name, steps});
  own_loop.environment.emplace_back("OMP_NUM_THREADS", "1");
  add_peers(row, alternate({{ours, own_loop}, {"malloc", with_malloc(own_loop)}}, measurement, step_ms));
  row.notes.push_back("malloc: processes without a Launch that have its settings of malloc, beside such without");
}

}  // namespace

struct Peers::State {
  std::string hosts;  ///< the hosts of the ranks, as mpirun takes them; empty for this host
  detail::TemporaryFolder scratch{"muster-bench-",
                                  hosts.empty() ? detail::temporary_parent() : std::filesystem::current_path()};
  std::optional<std::string> torch_python = {};
  std::optional<std::string> muster_python = {};
  std::optional<std::string> ray_python = {};

  Program under_mpirun(const std::string& name, int ranks, const std::string& python, std::vector<std::string> settings,
                       const std::vector<std::string>& arguments) const;
};

Peers::Peers(std::string hosts) : state_(new State{.hosts = std::move(hosts)}) {
  state_->torch_python = python_with({"torch"});
  state_->muster_python = python_with({"torch", "muster_torch"});
  state_->ray_python = python_with({"torch", "ray"});
  write(state_->scratch.path() / "torch_job.py", torch_job);
  write(state_->scratch.path() / "ray_job.py", ray_job);
}

Peers::~Peers() = default;

std::string Peers::note_of_missing(const std::string& names, const std::string& module, const std::string& packages) {
  return names + ": left out, since no Python has " + module +
         ", neither that of an active virtual environment nor python3 in PATH. To have it: python3 -m venv peers && "
         "peers/bin/pip install " +
         packages + " && . peers/bin/activate";
}

std::optional<Program> Peers::torchrun(const std::string& name, int ranks, const std::vector<std::string>& arguments,
                                       const std::vector<std::string>& flags) const {
  if (!state_->torch_python) return std::nullopt;
  const auto folder = state_->scratch.path().string();
  Command command{.words = {*state_->torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                            std::to_string(ranks)},
                  .environment = {{"OMP_NUM_THREADS", "1"}, {"GLOO_SOCKET_IFNAME", "lo"}, {folder_variable, folder}}};
  auto& words = command.words;
  words.insert(words.end(), flags.begin(), flags.end());
  words.push_back(folder + "/torch_job.py");
  words.insert(words.end(), arguments.begin(), arguments.end());
  return Program{name, std::move(command)};
}

/// Returns torch_job.py under mpirun. `settings`: NAME=VALUE; mpirun would not give its own environment to other hosts.
Program Peers::State::under_mpirun(const std::string& name, int ranks, const std::string& python,
                                   std::vector<std::string> settings, const std::vector<std::string>& arguments) const {
  std::vector<std::string> words{"env", "OMP_NUM_THREADS=1"};
  words.insert(words.end(), settings.begin(), settings.end());
  words.insert(words.end(), {python, scratch.path().string() + "/torch_job.py"});
  words.insert(words.end(), arguments.begin(), arguments.end());
  return {name, bench::under_mpirun(ranks, words, hosts)};
}

std::optional<Program> Peers::ddp_over_gloo(const std::string& name, int ranks,
                                            const std::vector<std::string>& arguments) const {
  if (!state_->torch_python) return std::nullopt;
  const auto first_host = state_->hosts.substr(0, state_->hosts.find_first_of(":,"));
  return state_->under_mpirun(name, ranks, *state_->torch_python, {"MASTER_ADDR=" + first_host, "MASTER_PORT=29500"},
                              arguments);
}

std::optional<Program> Peers::ddp_over_muster(const std::string& name, int ranks,
                                              const std::vector<std::string>& arguments) const {
  if (!state_->muster_python) return std::nullopt;
  return state_->under_mpirun(name, ranks, *state_->muster_python, {"MUSTER_BENCH_BACKEND=muster"}, arguments);
}

std::optional<Program> Peers::ray_train(const std::string& job, int ranks) const {
  if (!state_->ray_python) return std::nullopt;
  const auto& folder = state_->scratch.path();
  return Program{"ray_train", Command{.words = {*state_->ray_python, (folder / "ray_job.py").string(), job,
                                                std::to_string(ranks), folder.string()},
                                      .environment = {{"OMP_NUM_THREADS", "1"}, {"RAY_USAGE_STATS_ENABLED", "0"}}}};
}

void add_step_peers(Row& row, const Options& options, const Measurement& measurement) {
  // Steps for about one and a half seconds; the same number in each program.
  const auto steps =
      std::to_string(std::clamp(static_cast<int>(std::lround(1500 / row.median_ms.at(0).second)), 5, 500));
  if (row.name == own_loop_case || row.name == own_loop_prepared_case)
    return add_own_loop_with_malloc(row, options.ranks, steps, measurement);
  const auto* job = find_step_case(row.name);
  if (!job) {
    row.notes.push_back(row.name + ": no peer has this step as a program of its own");
    return;
  }
  const Peers peers(options.hosts);
  const bool on_this_host = options.hosts.empty();
  const std::vector<std::string> arguments{"step", job->model, std::to_string(job->batch_size), steps};
  auto ddp = on_this_host ? peers.torchrun("torch_ddp", options.ranks, arguments)
                          : peers.ddp_over_gloo("torch_ddp", options.ranks, arguments);
  if (!ddp) {
    row.notes.push_back(Peers::note_of_missing("torch_ddp, torch_ddp_malloc", "torch", "torch"));
    return;
  }
  std::vector<Program> programs{{ours, on_ranks(options.ranks, {"job", "step", row.name, steps}, options.hosts)}, *ddp};
  if (on_this_host) programs.push_back({"torch_ddp_malloc", with_malloc(std::move(ddp->command))});
  if (auto over_muster = peers.ddp_over_muster("torch_ddp_over_muster", options.ranks, arguments))
    programs.push_back(std::move(*over_muster));
  else
    row.notes.push_back(
        "torch_ddp_over_muster: left out, since no Python has torch and muster_torch. To have it: "
        "scripts/build-python, and install the wheel that it makes");
  add_peers(row, alternate(programs, measurement, step_ms));
  row.notes.push_back(on_this_host
                          ? "torch_ddp and torch_ddp_malloc (with muster's settings of malloc) are processes of their "
                            "own, in rounds beside processes of muster"
                          : "torch_ddp: processes of their own, in rounds beside processes of muster");
}

}  // namespace muster::bench
