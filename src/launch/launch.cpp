#include "muster/launch.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/environment.hpp"
#include "comm/together.hpp"
#include "launch/given.hpp"
#include "launch/settings.hpp"
#include "launch/stop_signal.hpp"
#include "launch/threads.hpp"
#include "launch/worlds.hpp"
#include "muster/version.hpp"

#include <malloc.h>
#include <sys/mman.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>

namespace muster {

using namespace std::chrono_literals;

namespace {

/// How long the other ranks may take to hear of an error that ends the program.
constexpr auto grace = 30s;

/// Large tensors come from the heap and go back to it, in place of being mapped and page-faulted anew at every step.
/// The heap begins with a stretch in huge pages, where the kernel gives them to who asks; memory is taken when it is
/// used.
void prepare_malloc() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  ::mallopt(M_TOP_PAD, 64 << 20);
  constexpr std::size_t bytes = std::size_t{1} << 30, huge_page = std::size_t{2} << 20;
  if (void* const stretch = std::malloc(bytes)) {
    const auto begin = (reinterpret_cast<std::uintptr_t>(stretch) + huge_page - 1) / huge_page * huge_page;
    ::madvise(reinterpret_cast<void*>(begin), bytes - huge_page, MADV_HUGEPAGE);
    std::free(stretch);
  }
#endif
}

void refuse_separate_worlds(const std::optional<detail::launch::Mismatch>& mismatch) {
  if (!mismatch) return;
  if (mismatch->task == 0) {
    detail::log::error(Error(ExitCode::usage, "starting", mismatch->fact, mismatch->remedy).what());
    detail::log::flush();
  }
  std::exit(static_cast<int>(ExitCode::usage));
}

struct Parsing {
  std::string resume = "auto", progress = "auto", log_level = "info", time_limit, backend, storage, name, config;
  double timeout = 0;
  int workers = 0, threads = 0;
};

}  // namespace

struct Launch::State {
  State(int argc_, char** argv_, std::string version_)
      : argc(argc_), argv(argv_), version(std::move(version_)), program(std::filesystem::path(argv_[0]).filename()) {}

  void add_flags();
  /// Parses this rank's words and environment; what was given, packed.
  std::string read();
  /// On all ranks alike. False if it was asked for help or the version, which it has shown.
  bool parse();
  void resolve();
  void choose_threads();

  int argc;
  char** argv;
  std::string version;
  std::string program;
  CLI::App app;
  std::optional<std::string> asked_for;  ///< the help or the version
  Parsing parsing;
  LaunchFlags flags;
  int threads = 1;
  int cpus = 1;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::optional<detail::comm::Environment> environment;
};

void Launch::State::add_flags() {
  app.name(program);
  app.set_version_flag("--version", program + " " + (version.empty() ? "" : version + ", ") + "muster " MUSTER_VERSION);
  const auto option = [this](const char* name, auto& value, const char* help) {
    std::string variable = "MUSTER_";
    for (const char* c = name + 2; *c != '\0'; ++c)
      variable += *c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
    return app.add_option(name, value, help)->envname(variable)->group("muster")->take_last();
  };
  option("--storage", parsing.storage, "Folder of the runs, on a file system that all nodes share [runs]");
  option("--name", parsing.name, "The run's name [program and Slurm job id, or program and time]");
  option("--config", parsing.config, "JSON file with settings of the program");
  app.add_option("--set", flags.set, "One setting, as in --set lr=0.01; repeatable")
      ->group("muster")
      ->type_size(1)
      ->take_all();
  option("--resume", parsing.resume, "auto, never, must, or the path of a checkpoint or run [auto]");
  option("--seed", flags.seed, "Seed of the weights and of the order of the data [0]");
  option("--workers", parsing.workers, "Ranks that train [all]")->check(CLI::PositiveNumber);
  option("--threads", parsing.threads, "Threads of torch per rank [its share of the CPUs]")->check(CLI::PositiveNumber);
  option("--backend", parsing.backend, "auto, mpi, gloo, nccl, or by device: cpu:mpi,cuda:nccl [auto]");
  option("--timeout", parsing.timeout, "Seconds that ranks wait for each other [1800]")->check(CLI::PositiveNumber);
  option("--time-limit", parsing.time_limit, "Save and stop after that time, as in 1h30m");
  option("--progress", parsing.progress, "auto, bar, plain or none [auto]")
      ->check(CLI::IsMember({"auto", "bar", "plain", "none"}));
  option("--log-level", parsing.log_level, "trace, debug, info, warn, error or off [info]");
}

std::string Launch::State::read() {
  try {
    app.parse(argc, argv);
    return detail::launch::pack(detail::launch::given_to(app));
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, problem;
    asked_for.reset();
    if (app.exit(error, out, problem) == 0) {
      asked_for = out.str();
      return {};
    }
    std::string fact = error.what();
    std::replace(fact.begin(), fact.end(), '\n', ' ');
    throw Error(ExitCode::usage, "reading the command line", fact, program + " --help lists the flags");
  }
}

bool Launch::State::parse() {
  const auto& world = environment->world();
  detail::launch::carry(
      app, detail::launch::unpack(world.broadcast(detail::launch::pack(detail::launch::environment_of(app)))));
  std::vector<detail::launch::Values> given;
  for (const auto& packed : detail::comm::on_all(world, [this] { return read(); }))
    given.push_back(detail::launch::unpack(packed));
  if (world.all_reduce(std::int64_t{asked_for.has_value()}, ReduceOp::max) != 0) {
    if (world.rank() == 0 && asked_for) std::cout << *asked_for << std::flush;
    return false;
  }
  detail::launch::require_alike(given, world.topology().hosts);
  detail::launch::complete(app, given[0]);
  return true;
}

void Launch::State::resolve() {
  detail::log::start(environment->world().rank(), detail::log::level_from_name(parsing.log_level));
  if (!parsing.storage.empty()) flags.storage = parsing.storage;
  if (!parsing.name.empty()) flags.name = parsing.name;
  if (!parsing.config.empty()) flags.config_file = parsing.config;
  if (!parsing.backend.empty()) flags.backend = parsing.backend;
  if (parsing.workers > 0) flags.workers = parsing.workers;
  if (parsing.threads > 0) flags.threads = parsing.threads;
  if (parsing.timeout > 1e9)
    throw Error(ExitCode::usage, "reading --timeout", "no wait is longer than 1000000000 seconds", "Give fewer");
  if (parsing.timeout > 0) {
    flags.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(parsing.timeout * 1000));
    detail::comm::set_time_limit(environment->world(), *flags.timeout);
  }
  if (!parsing.time_limit.empty()) flags.time_limit = detail::launch::parse_duration(parsing.time_limit);
  if (parsing.resume == "auto" || parsing.resume == "never" || parsing.resume == "must") {
    flags.resume = parsing.resume == "auto"    ? Resume::automatic
                   : parsing.resume == "never" ? Resume::never
                                               : Resume::must;
  } else {
    flags.resume = Resume::path;
    flags.resume_path = parsing.resume;
  }
  flags.progress = parsing.progress == "bar"     ? Progress::bar
                   : parsing.progress == "plain" ? Progress::plain
                   : parsing.progress == "none"  ? Progress::none
                                                 : Progress::automatic;
}

void Launch::State::choose_threads() {
  const auto& world = environment->world();
  const auto& topology = world.topology();
  const auto all = world.all_gather(detail::launch::own_mask());
  std::vector<std::string> local;
  for (std::size_t r = 0; r < all.size(); ++r)
    if (topology.node_of_rank[r] == topology.node_rank) local.push_back(all[r]);
  cpus = detail::launch::threads_for(local, topology.local_rank);
  const char* chosen = std::getenv("OMP_NUM_THREADS");
  if (flags.threads)
    threads = *flags.threads;
  else if (chosen != nullptr && std::atoi(chosen) > 0)
    threads = std::atoi(chosen);
  else
    threads = cpus;
  const int of_node = detail::launch::launcher_cpus();
  if (flags.threads || !detail::launch::bound_below_share(local, topology.local_rank, of_node)) return;
  detail::log::warn("each rank is bound to " + std::to_string(cpus) + " of " + std::to_string(of_node) +
                    " CPUs; start with mpirun --bind-to none, or srun --cpus-per-task, to use them all");
}

Launch::Launch(int argc, char** argv, std::string version)
    : state_(std::make_unique<State>(argc, argv, std::move(version))) {
  prepare_malloc();
  detail::launch::stop_signal::heed();
  const auto environment = [](const char* name) -> const char* { return std::getenv(name); };
  refuse_separate_worlds(detail::launch::srun_without_pmix(environment));
  state_->environment.emplace();
  detail::log::start(rank(), detail::log::Level::info);
  refuse_separate_worlds(detail::launch::independent_worlds(environment, size()));
  state_->add_flags();
}

Launch::~Launch() { detail::log::flush(); }

CLI::App& Launch::app() { return state_->app; }
const Communicator& Launch::communicator() const noexcept { return state_->environment->world(); }
const LaunchFlags& Launch::flags() const noexcept { return state_->flags; }
const std::string& Launch::program() const noexcept { return state_->program; }
int Launch::threads_per_rank() const noexcept { return state_->threads; }
int Launch::cpus_per_rank() const noexcept { return state_->cpus; }

bool Launch::stop_requested() const noexcept {
  const auto& limit = state_->flags.time_limit;
  return detail::launch::stop_signal::came() || (limit && std::chrono::steady_clock::now() - state_->begin >= *limit);
}

int Launch::finish(const Result& result) {
  if (!result.error) return 0;
  detail::log::error(result.error->what());
  return static_cast<int>(result.error->code());
}

void Launch::give_up(const Error& error) {
  // Rank 0 may be the one that does not answer, so whoever knows says it.
  std::fprintf(stderr, "muster: error: rank %d (%s): %s\n", rank(),
               communicator().topology().hosts[static_cast<std::size_t>(rank())].c_str(), error.what());
  detail::log::flush();
  detail::comm::abort(static_cast<int>(error.code()));
}

int Launch::run_body(const std::function<int()>& body) {
  using detail::comm::Outcome;
  int status = 0;
  Outcome mine;
  try {
    if (!state_->parse()) return 0;
    state_->resolve();
    state_->choose_threads();
    status = body();
  } catch (const detail::comm::Lost& error) {
    give_up(error);
  } catch (...) {
    mine = detail::comm::caught();
    detail::comm::raise_alarm(communicator(), mine);
  }

  try {
    const auto limit =
        mine.kind == Outcome::Kind::done ? detail::comm::time_limit(communicator()) : std::chrono::milliseconds(grace);
    const auto cause =
        detail::comm::root_cause(detail::comm::agree(communicator(), mine, limit), communicator().topology().hosts);
    if (cause) {
      detail::log::error(cause->what());
      return static_cast<int>(cause->code());
    }
    return status;
  } catch (const detail::comm::Lost& error) {
    give_up(mine.kind == Outcome::Kind::failed ? Error(mine.code, mine.text) : Error(error));
  }
}

}  // namespace muster
