#include "muster/launch.hpp"

#include "base/log.hpp"
#include "base/temporary.hpp"
#include "comm/agreement.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "comm/timeout.hpp"
#include "comm/wait.hpp"
#include "launch/binding.hpp"
#include "launch/flags.hpp"
#include "launch/job_end.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"
#include "launch/part.hpp"
#include "launch/stop_signal.hpp"
#include "launch/supervised.hpp"

#include <malloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

/// Makes malloc keep the memory of large tensors in the heap, which would otherwise be mapped and page-faulted again in
/// every step. The first GiB of the heap asks for huge pages. Memory is taken only when it is used.
void prepare_malloc() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
  ::mallopt(M_TOP_PAD, 64 << 20);
  constexpr std::size_t bytes = std::size_t{1} << 30, huge_page = std::size_t{2} << 20;
  if (void* const memory = std::malloc(bytes)) {
    const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + huge_page - 1) / huge_page * huge_page;
    ::madvise(reinterpret_cast<void*>(begin), bytes - huge_page, MADV_HUGEPAGE);
    std::free(memory);
  }
#endif
}

void refuse_separate_worlds(const std::optional<detail::launch::SeparateWorlds>& worlds) {
  if (!worlds) return;
  if (worlds->is_said_here) {
    detail::log::error(Error(ExitCode::usage, "starting", worlds->fact, worlds->remedy).what());
    detail::log::flush();
  }
  std::exit(static_cast<int>(ExitCode::usage));
}

/// How many sweeps each launch has begun.
struct Sweeps {
  std::mutex mutex;
  std::map<const LaunchFlags*, int> of_launches;
} sweeps;

}  // namespace

/// All that a launch owns, a member for each thing; end_launch() ends them in reverse order.
struct Launch::State {
  State(int argc_, char** argv_, const std::string& version)
      : argc(argc_), argv(argv_), program(std::filesystem::path(argv_[0]).filename()), parser(program, version) {}
  ~State() { end_launch(); }

  /// Makes `all` the ranks of this launch, of which this process is one.
  void join(Communicator all) {
    local_process_index = all.topology().local_rank;
    answering.emplace(all);
    ranks.emplace(std::move(all));
  }
  void choose_threads();
  void choose_end();
  bool owns_mpi() const noexcept { return environment && environment->owns_mpi(); }
  /// run() returns this code.
  int returned(int code);
  /// Ends what this launch has begun, with MPI as the last thing. Does nothing when called again.
  void end_launch() noexcept;

  /// The one that ends with the process, after run(), unless it ends before: none is destroyed by std::exit,
  /// quick_exit, or in memory that is never freed.
  static inline State* ends_with_process = nullptr;

  int argc;
  char** argv;
  std::string program;
  detail::launch::Flags parser;
  LaunchFlags flags;
  int threads = 1;
  int cpus = 1;
  int trainers = 0;
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> end;
  detail::launch::AskedJobEnd asked_job_end;  ///< on rank 0, where no variable tells the end of the job
  int local_process_index = 0;
  std::set<pid_t> processes;          ///< of this launch on this host
  std::vector<detail::Claim> claims;  ///< on cores of this node
  bool is_running = false;            ///< inside of run()
  std::optional<int> status;          ///< of the last run()
  std::function<bool()> asked_to_stop = [] { return false; };
  std::vector<std::shared_ptr<Callback>> callbacks;
  std::optional<detail::comm::MpiScope> environment;  ///< empty if the program itself initialises MPI
  std::optional<Communicator> ranks;
  std::optional<detail::comm::AnsweringThread> answering;
  std::optional<detail::launch::stop_signal::ScopedHandlers> signals;
  std::optional<detail::log::Scope> log;
};

int Launch::State::returned(int code) {
  is_running = false;
  if (!owns_mpi()) return code;
  // Each rank tells, since what it does next may end the others.
  if (status) detail::launch::tell_supervisor(detail::launch::message_returned, std::to_string(*status));
  ends_with_process = this;
  static const pid_t process = ::getpid();
  constexpr auto end = [] {
    if (ends_with_process != nullptr && ::getpid() == process) ends_with_process->end_launch();  // not in a fork
  };
  // Now, so that it is called before the destructors of static objects that training has made.
  std::atexit(end);
  std::at_quick_exit(end);
  return code;
}

void Launch::State::end_launch() noexcept {
  if (ends_with_process == this) ends_with_process = nullptr;
  if (!ranks) return;
  {
    const std::lock_guard lock(sweeps.mutex);
    sweeps.of_launches.erase(&flags);
  }
  detail::log::flush();
  // Once all ranks are here, nothing is left to do but MPI_Finalize: a crash there spoils no work.
  if (status && owns_mpi()) {
    environment->wait_for_all();
    if (ranks->rank() == 0) detail::launch::tell_supervisor(detail::launch::message_ended, "");
  }
  log.reset();
  signals.reset();
  answering.reset();
  ranks.reset();
  environment.reset();
}

void Launch::State::choose_threads() {
  const auto& world = *ranks;
  const int local_rank = world.topology().local_rank;
  auto node = detail::launch::find_node_ranks(world);
  processes = node.processes;
  const char* const variable = std::getenv("OMP_NUM_THREADS");
  const auto of_variable = detail::launch::openmp_threads(::getenv);
  if (variable != nullptr && *variable != '\0' && !of_variable)
    detail::log::warn("OMP_NUM_THREADS=" + std::string(variable) + " is no number of threads from 1 to " +
                      std::to_string(detail::launch::most_threads) + " and is ignored; unset it");
  const int given = flags.threads.value_or(of_variable.value_or(0));
  const auto binding = detail::launch::openmp_binding(::getenv);
  const bool shares = detail::launch::share_cpus(node.masks);
  if (const int of_node = detail::launch::launcher_cpus();
      !flags.threads && detail::launch::bound_below_share(node.masks, local_rank, of_node))
    detail::log::warn("each rank is bound to " + std::to_string(detail::launch::threads_for(node.masks, local_rank)) +
                      " of " + std::to_string(of_node) + " CPUs; " +
                      (binding.empty() ? "start with mpirun --bind-to none, or srun --cpus-per-task,"
                                       : "unset " + binding + ", or start with mpirun --bind-to none,") +
                      " to use them all");
  // The threads of a program that has brought its own ranks are that program's.
  // A rank that is bound to one core waits there for any other process that computes, and all ranks with it.
  if (environment && flags.bind != Bind::none)
    claims = detail::launch::bind_to_cores(world, node, given, flags.bind == Bind::cores ? 1 : 2);
  cpus = detail::launch::threads_for(node.masks, local_rank, node.quota);
  threads = given > 0 ? given : cpus;
  // OpenMP binds the threads beside the main thread when it starts them, whatever this process is bound to.
  if (!binding.empty() && shares && (threads > 1 || !environment || flags.bind == Bind::none))
    detail::log::warn(binding +
                      " binds the threads of all ranks of a node to the same cores, so that they slow each "
                      "other; unset it: muster gives each rank cores of its own (--bind)");
}

void Launch::State::choose_end() {
  using std::chrono::steady_clock, std::chrono::system_clock;
  const auto now = system_clock::now();
  if (flags.time_limit) {
    // The limit is that of all starts under one `muster run`.
    const auto supervisor = detail::launch::supervisor();
    end = begin - (supervisor ? supervisor->used : std::nullopt).value_or(std::chrono::seconds(0)) + *flags.time_limit;
    return;
  }
  if (!asked_job_end.note.empty()) detail::log::debug(asked_job_end.note);
  const auto warning = detail::launch::job_end_warning(::getenv, now);
  auto job_end = detail::launch::end_of_allocation(::getenv, now);
  if (!job_end) job_end = asked_job_end.end;
  if (!job_end && !warning.empty()) detail::log::warn(warning);
  // Ranks of other nodes may not have the variable, and only rank 0 has asked. The first that knows says how much time
  // is left, since the clock of a node may be wrong.
  const auto left = job_end ? std::to_string(std::chrono::ceil<std::chrono::seconds>(*job_end - now).count()) : "";
  const auto all = ranks->all_gather(left);
  const auto known = std::ranges::find_if(all, [](const auto& seconds) { return !seconds.empty(); });
  if (known != all.end()) end = steady_clock::now() + std::chrono::seconds(std::stoll(*known));
}

Launch::Launch(int argc, char** argv, const std::string& version)
    : state_(std::make_unique<State>(argc, argv, version)) {
  detail::require_home();
  prepare_malloc();
  detail::launch::stop_signal::install_handlers(/*terminate=*/detail::launch::started_by_srun(::getenv));
  // A limit on the size of files then makes a write fail, as a full disk does, and does not end the rank.
  if (const auto before = ::signal(SIGXFSZ, SIG_IGN); before != SIG_DFL) ::signal(SIGXFSZ, before);
  if (detail::launch::supervisor()) detail::launch::end_with_launcher();
  detail::launch::forget_other_launchers(detail::comm::mpi_library());
  refuse_separate_worlds(detail::launch::srun_without_pmix(::getenv, detail::comm::mpi_library()));
  // `muster run` has asked already. Afterwards no other program should be started: some MPIs do not allow it.
  if (!detail::launch::supervisor() && detail::launch::is_first_process(::getenv) &&
      !detail::launch::end_of_allocation(::getenv, std::chrono::system_clock::now()))
    state_->asked_job_end = detail::launch::ask_for_job_end(::getenv);
  if (const auto process = detail::launch::process_for_launcher(::getenv); !process.empty())
    detail::launch::tell_supervisor(detail::launch::message_process, process);
  const auto timeout = detail::launch::timeout_at_start(argc, argv).value_or(detail::comm::default_timeout);
  state_->environment.emplace(timeout);
  state_->join(state_->environment->world());
  detail::comm::set_timeout(communicator(), timeout);
  detail::log::configure(rank(), detail::log::Level::info);
  refuse_separate_worlds(detail::launch::separate_worlds(::getenv, size(), detail::comm::mpi_library()));
  if (rank() == 0) detail::launch::tell_supervisor(detail::launch::message_up, std::to_string(size()));
}

Launch::Launch(int argc, char** argv, const Communicator& ranks, const std::string& version)
    : state_(std::make_unique<State>(argc, argv, version)) {
  detail::comm::require_mpi("starting on the ranks of a communicator");
  state_->log.emplace();
  state_->signals.emplace();
  const auto timeout = detail::launch::timeout_at_start(argc, argv);
  const detail::comm::ScopedTimeout while_joining(ranks, timeout.value_or(detail::comm::timeout(ranks)));
  state_->join(detail::comm::make_separate_world(ranks));
  detail::log::configure(rank(), detail::log::Level::info);
  if (rank() == 0) detail::launch::tell_supervisor(detail::launch::message_up, std::to_string(size()));
}

Launch::Launch(const Launch& whole, detail::launch::LaunchPart part)
    : state_(std::make_unique<State>(whole.state_->argc, whole.state_->argv, std::string())) {
  state_->join(std::move(part.ranks));
  state_->flags = std::move(part.flags);
  state_->threads = whole.state_->threads;
  state_->cpus = whole.state_->cpus;
  state_->end = whole.state_->end;
  state_->local_process_index = whole.state_->local_process_index;
  state_->processes = whole.state_->processes;
  state_->asked_to_stop = [&whole, asked = std::move(part.asked_to_stop)] {
    return whole.stop_requested() || (asked && asked());
  };
  state_->callbacks = std::move(part.callbacks);
}

Launch::~Launch() {
  // A static Launch whose process ends inside of run(), by std::exit: MPI_Finalize would wait for the other ranks.
  if (state_ && state_->is_running) static_cast<void>(state_.release());
}

CLI::App& Launch::app(detail::launch::ThisCli11) { return state_->parser.app; }
const Communicator& Launch::communicator() const noexcept { return *state_->ranks; }
const LaunchFlags& Launch::flags() const noexcept { return state_->flags; }
const std::string& Launch::program() const noexcept { return state_->program; }
int Launch::threads_per_rank() const noexcept { return state_->threads; }
int Launch::cpus_per_rank() const noexcept { return state_->cpus; }
int Launch::local_process_index() const noexcept { return state_->local_process_index; }
const std::set<pid_t>& Launch::processes_of_host() const noexcept { return state_->processes; }
int detail::launch::next_sweep_number(const LaunchFlags& of) {
  const std::lock_guard lock(sweeps.mutex);
  return ++sweeps.of_launches[&of];
}

int Launch::next_trainer_number() noexcept { return ++state_->trainers; }
const std::vector<std::shared_ptr<Callback>>& Launch::callbacks() const noexcept { return state_->callbacks; }

std::optional<std::chrono::duration<double>> Launch::time_left() const noexcept {
  if (!state_->end) return {};
  return *state_->end - std::chrono::steady_clock::now();
}

bool Launch::stop_requested() const noexcept {
  const auto left = time_left();
  return detail::launch::stop_signal::is_requested() || (left && left->count() <= 0) || state_->asked_to_stop();
}

void Launch::print(const std::optional<Error>& error) {
  if (error && error->code() != ExitCode::done) detail::log::error(error->what());
}

void Launch::give_up(const Error& error) { detail::comm::give_up(communicator(), error); }

int Launch::run_body(const std::function<int()>& body) {
  namespace comm = detail::comm;
  using comm::Outcome;
  int status = 0;
  Outcome mine;
  state_->is_running = true;
  try {
    auto& parser = state_->parser;
    if (!parser.parse(communicator(), state_->argc, state_->argv)) return state_->returned(0);
    detail::log::configure(rank(), detail::log::level_from_name(parser.log_level()));
    state_->flags = parser.resolve();
    if (const auto& timeout = state_->flags.timeout) comm::set_timeout(communicator(), *timeout);
    state_->choose_threads();
    state_->choose_end();
    status = body();
  } catch (const comm::RanksMissing& error) {
    std::this_thread::sleep_for(error.report_delay());
    give_up(error);
  } catch (...) {
    mine = comm::current_outcome();
    comm::raise_alarm(communicator(), mine);
  }

  try {
    const auto& world = communicator();
    const auto timeout = mine.kind == Outcome::Kind::done ? comm::timeout(world) : comm::final_grace(world);
    if (mine.kind == Outcome::Kind::done) mine.text = std::to_string(status);
    const auto outcomes = comm::agree(world, mine, timeout);
    const auto cause = comm::root_cause(outcomes, world.topology().hosts);
    print(cause);
    const auto ended_badly = std::ranges::find_if(outcomes, [](const Outcome& one) { return one.text != "0"; });
    status = cause ? static_cast<int>(cause->code()) : ended_badly != outcomes.end() ? std::stoi(ended_badly->text) : 0;
    state_->status = status;
    return state_->returned(status);
  } catch (const comm::RanksMissing& error) {
    std::this_thread::sleep_for(error.report_delay());
    give_up(mine.kind == Outcome::Kind::failed ? Error(mine.code, mine.text) : Error(error));
  } catch (const Error& error) {  // MPICH reports a lost rank as an error of MPI
    give_up(mine.kind == Outcome::Kind::failed ? Error(mine.code, mine.text) : error);
  }
}

}  // namespace muster
