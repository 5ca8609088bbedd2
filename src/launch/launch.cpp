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
#include "launch/malloc.hpp"
#include "launch/part.hpp"
#include "launch/stop_signal.hpp"
#include "launch/supervised.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace muster {
namespace {

void refuse_separate_worlds(const std::optional<detail::launch::SeparateWorlds>& worlds) {
  if (!worlds) return;
  if (worlds->is_printed_here) {
    detail::log::error(Error(ExitCode::usage, "starting", worlds->fact, worlds->remedy).what());
    detail::log::flush();
  }
  std::exit(static_cast<int>(ExitCode::usage));
}

}  // namespace

/// All that a launch owns. end_launch() ends what the launch has begun, in reverse order.
struct Launch::State {
  explicit State(std::shared_ptr<detail::launch::Flags> parser_) : parser(std::move(parser_)) {}
  ~State() { end_launch(); }

  /// Makes this process a rank of this launch.
  void join(detail::launch::LaunchPart whole_or_part) {
    on_host.local_process_index = whole_or_part.ranks.topology().local_rank;
    answering.emplace(whole_or_part.ranks);
    part.emplace(std::move(whole_or_part));
  }
  bool owns_mpi() const noexcept { return environment && environment->owns_mpi(); }
  /// Called when run() is about to return `code`; returns it. If the launch owns MPI, tells the supervisor the exit
  /// code, and arranges that the launch ends with the process.
  int returned(int code);
  /// Ends everything that this launch has begun; MPI comes last. A second call does nothing.
  void end_launch() noexcept;

  /// The launch whose run() has returned last; null if it has ended. It also ends when the process ends, since nothing
  /// may destroy it: the process may call std::exit or quick_exit, or hold the Launch in memory that is never freed.
  static inline State* ends_with_process = nullptr;

  const std::shared_ptr<detail::launch::Flags> parser;
  int trainers = 0, sweeps = 0;
  detail::launch::LaunchEnd end;
  detail::launch::RankOnHost on_host;
  bool is_running = false;                            ///< inside of run()
  std::optional<int> status;                          ///< the exit code that run() returns, when all ranks agree on it
  std::optional<detail::comm::MpiScope> environment;  ///< empty for a launch on given ranks or of a trial
  std::optional<detail::launch::LaunchPart> part;     ///< all ranks, or the ranks of a sweep's trial
  std::optional<detail::comm::AnsweringThread> answering;
  std::optional<detail::launch::stop_signal::ScopedHandlers> signals;
  std::optional<detail::log::Scope> log;
};

int Launch::State::returned(int code) {
  is_running = false;
  if (!owns_mpi()) return code;
  // Each rank sends the message, since what a rank does next may end the other ranks.
  if (status) detail::launch::tell_supervisor(detail::launch::message_returned, std::to_string(*status));
  ends_with_process = this;
  static const pid_t process = ::getpid();
  constexpr auto end = [] {
    if (ends_with_process != nullptr && ::getpid() == process) ends_with_process->end_launch();  // not in a child
  };
  // Registered now, so that it is called before the destructors of static objects that training has made.
  std::atexit(end);
  std::at_quick_exit(end);
  return code;
}

void Launch::State::end_launch() noexcept {
  if (ends_with_process == this) ends_with_process = nullptr;
  if (!part) return;
  detail::log::flush();
  // When all ranks are here, only MPI_Finalize is left, so a crash from now on loses no work.
  if (status && owns_mpi()) {
    environment->wait_for_all();
    if (part->ranks.rank() == 0) detail::launch::tell_supervisor(detail::launch::message_ended, "");
  }
  log.reset();
  signals.reset();
  answering.reset();
  part.reset();
  environment.reset();
}

Launch::Launch(int argc, char** argv, const std::string& version)
    : state_(std::make_unique<State>(std::make_shared<detail::launch::Flags>(argc, argv, version))) {
  detail::ensure_home();
  detail::launch::prepare_malloc();
  detail::launch::stop_signal::install_handlers(/*terminate=*/detail::launch::started_by_srun(::getenv));
  // Ignore SIGXFSZ, so that a limit on the size of files makes a write fail, as a full disk does, and does not end the
  // rank. A handler of the program's own stays.
  if (const auto before = ::signal(SIGXFSZ, SIG_IGN); before != SIG_DFL) ::signal(SIGXFSZ, before);
  if (detail::launch::supervisor()) detail::launch::end_with_launcher();
  detail::launch::forget_other_launchers(detail::comm::mpi_library());
  refuse_separate_worlds(detail::launch::srun_without_pmix(::getenv, detail::comm::mpi_library()));
  state_->end.ask();
  if (const auto process = detail::launch::process_for_launcher(::getenv); !process.empty())
    detail::launch::tell_supervisor(detail::launch::message_process, process);
  const auto timeout = detail::launch::timeout_at_start(argc, argv).value_or(detail::comm::default_timeout);
  state_->environment.emplace(timeout);
  state_->join({.ranks = state_->environment->world()});
  detail::comm::set_timeout(communicator(), timeout);
  detail::log::configure(rank(), detail::log::Level::info);
  refuse_separate_worlds(detail::launch::separate_worlds(::getenv, size(), detail::comm::mpi_library()));
  if (rank() == 0) detail::launch::tell_supervisor(detail::launch::message_up, std::to_string(size()));
}

Launch::Launch(int argc, char** argv, const Communicator& ranks, const std::string& version)
    : state_(std::make_unique<State>(std::make_shared<detail::launch::Flags>(argc, argv, version))) {
  detail::comm::require_mpi("starting on the ranks of a communicator");
  state_->log.emplace();
  state_->signals.emplace(detail::comm::mpi_library_file());
  const auto timeout = detail::launch::timeout_at_start(argc, argv);
  const detail::comm::ScopedTimeout while_joining(ranks, timeout.value_or(detail::comm::timeout(ranks)));
  state_->join({.ranks = detail::comm::make_separate_world(ranks)});
  detail::log::configure(rank(), detail::log::Level::info);
  if (rank() == 0) detail::launch::tell_supervisor(detail::launch::message_up, std::to_string(size()));
}

Launch::Launch(const Launch& whole, detail::launch::LaunchPart part)
    : state_(std::make_unique<State>(whole.state_->parser)) {
  part.asked_to_stop = [&whole, asked = std::move(part.asked_to_stop)] {
    return whole.stop_requested() || (asked && asked());
  };
  state_->join(std::move(part));
  state_->on_host = whole.state_->on_host;
  state_->end = whole.state_->end;
}

Launch::~Launch() {
  // The process ends inside of run(), by std::exit, which destroys a static Launch. Do not finalise MPI then:
  // MPI_Finalize would wait for the other ranks.
  if (state_ && state_->is_running) static_cast<void>(state_.release());
}

CLI::App& Launch::app(detail::launch::ThisCli11) { return state_->parser->app; }
const Communicator& Launch::communicator() const noexcept { return state_->part->ranks; }
const LaunchFlags& Launch::flags() const noexcept { return state_->part->flags; }
const std::string& Launch::program() const noexcept { return state_->parser->program(); }
int Launch::threads_per_rank() const noexcept { return state_->on_host.threads; }
int Launch::cpus_per_rank() const noexcept { return state_->on_host.cpus; }
int Launch::local_process_index() const noexcept { return state_->on_host.local_process_index; }
const std::set<pid_t>& Launch::processes_of_host() const noexcept { return state_->on_host.processes; }
int detail::launch::LaunchPart::next_sweep_number(const Launch& launch) { return ++launch.state_->sweeps; }
int Launch::next_trainer_number() noexcept { return ++state_->trainers; }
const std::vector<std::shared_ptr<Callback>>& Launch::callbacks() const noexcept { return state_->part->callbacks; }

std::optional<std::chrono::duration<double>> Launch::time_left() const noexcept { return state_->end.time_left(); }

bool Launch::stop_requested() const noexcept {
  const auto left = time_left();
  return detail::launch::stop_signal::is_requested() || (left && left->count() <= 0) ||
         (state_->part->asked_to_stop && state_->part->asked_to_stop());
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
    auto& parser = *state_->parser;
    auto& flags = state_->part->flags;
    if (!parser.parse(communicator())) return state_->returned(0);
    detail::log::configure(rank(), detail::log::level_from_name(parser.log_level()));
    flags = parser.resolve();
    if (const auto& timeout = flags.timeout) comm::set_timeout(communicator(), *timeout);
    // If the program has given its own communicator, muster does not bind the program's threads to cores.
    state_->on_host = detail::launch::find_rank_on_host(communicator(), flags, state_->environment.has_value());
    state_->end.choose(communicator(), flags);
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
