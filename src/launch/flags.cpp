#include "launch/flags.hpp"

#include "comm/on_ranks.hpp"
#include "launch/agreed_flags.hpp"
#include "launch/settings.hpp"
#include "muster/version.hpp"

#include <algorithm>
#include <cctype>
#include <iostream>
#include <map>
#include <sstream>

namespace muster::detail::launch {

Flags::Flags(const std::string& program, const std::string& version) {
  app.name(program);
  app.set_version_flag("--version", program + " " + (version.empty() ? "" : version + ", ") + "muster " MUSTER_VERSION);
  const auto option = [this](const char* name, auto& value, const char* help) {
    std::string variable = "MUSTER_";
    for (const char* c = name + 2; *c != '\0'; ++c)
      variable += *c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
    return app.add_option(name, value, help)->envname(variable)->group("muster")->take_last();
  };
  option("--storage", storage_, "Folder of the runs, on a file system that all nodes share [runs]");
  option("--name", name_, "The run's name [program and Slurm job id, or program and time]");
  option("--config", config_, "JSON file with settings of the program");
  app.add_option("--set", set_, "One setting, as in --set lr=0.01; repeatable")
      ->group("muster")
      ->type_size(1)
      ->take_all();
  option("--resume", resume_, "auto, never, must, or the path of a checkpoint or run [auto]");
  option("--seed", seed_, "Seed of the weights and of the order of the data [0]");
  option("--workers", workers_, "Ranks that train [all]")->check(CLI::PositiveNumber);
  option("--threads", threads_, "Threads of torch per rank [its share of the CPUs]")->check(CLI::PositiveNumber);
  option("--backend", backend_, "auto, mpi, gloo, nccl, or by device: cpu:mpi,cuda:nccl [auto]");
  option("--timeout", timeout_, "Seconds that ranks wait for each other [1800]")->check(CLI::PositiveNumber);
  option("--time-limit", time_limit_, "Save and stop after that time, as in 1h30m");
  option("--progress", progress_, "auto, bar, plain or none [auto]")
      ->check(CLI::IsMember({"auto", "bar", "plain", "none"}));
  option("--log-level", log_level_, "trace, debug, info, warn, error or off [info]");
}

std::string Flags::read(int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return pack(shared_values(app));
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, problem;
    help_.reset();
    if (app.exit(error, out, problem) == 0) {
      help_ = out.str();
      return pack({});
    }
    std::string fact = error.what();
    std::replace(fact.begin(), fact.end(), '\n', ' ');
    throw Error(ExitCode::usage, "reading the command line", fact, app.get_name() + " --help lists the flags");
  }
}

bool Flags::parse(const Communicator& world, int argc, char** argv) {
  set_missing_variables(app, unpack(world.broadcast(pack(environment_of(app)))));
  std::vector<Values> values;
  for (const auto& packed : comm::on_all(world, [&] { return read(argc, argv); })) values.push_back(unpack(packed));
  if (world.all_reduce(std::int64_t{help_.has_value()}, ReduceOp::max) != 0) {
    if (world.rank() == 0 && help_) std::cout << *help_ << std::flush;
    return false;
  }
  require_equal(values, world.topology().hosts);
  fill_in(app, values[0]);
  return true;
}

LaunchFlags Flags::resolve() const {
  LaunchFlags flags;
  flags.set = set_;
  flags.seed = seed_;
  if (!storage_.empty()) flags.storage = storage_;
  if (!name_.empty()) flags.name = name_;
  if (!config_.empty()) flags.config_file = config_;
  if (!backend_.empty()) flags.backend = backend_;
  if (workers_ > 0) flags.workers = workers_;
  if (threads_ > 0) flags.threads = threads_;
  if (timeout_ > 1e9)
    throw Error(ExitCode::usage, "reading --timeout", "no wait is longer than 1000000000 seconds", "Give fewer");
  if (timeout_ > 0) flags.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_ * 1000));
  if (!time_limit_.empty()) flags.time_limit = parse_duration(time_limit_);
  static const std::map<std::string, Resume> resumes{
      {"auto", Resume::automatic}, {"never", Resume::never}, {"must", Resume::must}};
  const auto resume = resumes.find(resume_);
  flags.resume = resume == resumes.end() ? Resume::path : resume->second;
  if (flags.resume == Resume::path) flags.resume_path = resume_;
  static const std::map<std::string, Progress> modes{
      {"auto", Progress::automatic}, {"bar", Progress::bar}, {"plain", Progress::plain}, {"none", Progress::none}};
  flags.progress = modes.at(progress_);
  return flags;
}

}  // namespace muster::detail::launch
