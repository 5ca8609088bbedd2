// The launch: the object in main that starts and ends MPI, unless the program does, and reads the flags.
//
//   int main(int argc, char** argv) {
//     muster::Launch launch(argc, argv);
//     int width = 64;
//     launch.app().add_option("--width", width);          // needs <CLI/CLI.hpp>
//     return launch.run([&] { return muster::TorchTrainer(launch, train, {…}).fit(); });
//   }
#pragma once

#include <muster/communicator.hpp>
#include <muster/detail/export.hpp>
#include <muster/error.hpp>

#include <sys/types.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Defines CLI11's version number, without the rest of CLI11.
#if !defined(CLI11_VERSION_MAJOR) && __has_include(<CLI/Version.hpp>)
#include <CLI/Version.hpp>
#endif

namespace CLI {
class App;
}

namespace muster {

class Callback;
namespace detail::launch {
struct LaunchPart;

template <int major, int minor, int patch>
struct Cli11 {};

/// The CLI11 that the including source file is compiled with.
#ifdef CLI11_VERSION_MAJOR
using ThisCli11 = Cli11<CLI11_VERSION_MAJOR, CLI11_VERSION_MINOR, CLI11_VERSION_PATCH>;
#else
using ThisCli11 = Cli11<0, 0, 0>;
#endif
}  // namespace detail::launch

enum class Progress { automatic, bar, plain, none };
enum class Bind { automatic, cores, none };
enum class Resume { automatic, never, must, path };

/// The flags that every program has, with their resolved values: the flag, otherwise the environment variable
/// (MUSTER_NAME for --name, …), otherwise empty or the default, so that the program's own setting applies.
///
/// They are the same on all ranks, except for --threads and --log-level: a value that a rank was not given, by flag or
/// environment, is taken from rank 0; a value that differs from rank 0's is an error (ExitCode::usage). The same holds
/// for the program's own options that have a variable called MUSTER_…; its other options may differ.
struct LaunchFlags {
  std::optional<std::filesystem::path> storage;
  std::optional<std::string> name;
  std::vector<std::filesystem::path> config_files;  ///< if several have a setting, the last one counts
  std::vector<std::string> set;                     ///< "key.path=VALUE"
  Resume resume = Resume::automatic;
  std::filesystem::path resume_path;  ///< the checkpoint or run for Resume::path
  std::uint64_t seed = 0;
  bool has_seed = false;  ///< true if --seed or MUSTER_SEED is given; otherwise a continued run keeps its seed
  std::optional<int> workers;
  std::optional<int> threads;
  Bind bind = Bind::automatic;  ///< Bind::none: neither cores nor GPUs are claimed
  std::optional<std::string> backend;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<std::chrono::milliseconds> time_limit;
  Progress progress = Progress::automatic;
  std::optional<std::string> log_level;  ///< may differ between ranks
  bool tensorboard = false;
  /// The first and the last step of --profile=FIRST:LAST; both 0 for --profile (ProfileConfig).
  std::optional<std::pair<std::int64_t, std::int64_t>> profile;
  bool profile_operators = false;
};

/// What the body of Launch::run() may return, such as a Result: it has an exit code, and its error is printed once.
template <class T>
concept HasExitCode = requires(const T& ended) {
  { ended.exit_code() } -> std::same_as<ExitCode>;
  { ended.error } -> std::convertible_to<std::optional<Error>>;
};

/// Not movable. Make it at the beginning of main, before anything else of muster. A program that already has MPI makes
/// it where it trains.
class MUSTER_API Launch {
 public:
  /// Initialises MPI at THREAD_MULTIPLE unless it is initialised. Ignores SIGXFSZ unless the program has a handler for
  /// it, so that a write beyond the limit on the size of files fails and does not end the process. `version` is what
  /// --version prints after the program's name. Ends the process with ExitCode::usage if the launcher has started N
  /// worlds of one rank instead of one of N, or several programs of which not all make a Launch within 10 s. Otherwise
  /// it waits for all ranks as long as --timeout says, then ends the job with ExitCode::retry; a warning after 10 s
  /// says how many have come.
  Launch(int argc, char** argv, const std::string& version = {});
  /// A launch on the ranks of the caller's communicator, such as one from from_mpi() (muster/mpi.hpp). It leaves MPI,
  /// malloc, the threads' CPUs and the process's end as they are. An error on which the ranks agree only becomes
  /// run()'s exit code. If a rank of the launch does not answer, the others end the job. The launch handles SIGUSR1,
  /// SIGUSR2 and SIGHUP while it lives, except those that the program itself handles or ignores. The job's other ranks
  /// may do anything meanwhile; threads_per_rank() does not take them into account. Launches may follow one another;
  /// torch's seeds and number of threads stay as training has set them. If MPI was initialised below
  /// MPI_THREAD_MULTIPLE, sweeps, gloo and NCCL are refused, and asynchronous saving is off. Collective over `ranks`,
  /// which wait as long as --timeout says, by default as long as `ranks` do.
  Launch(int argc, char** argv, const Communicator& ranks, const std::string& version = {});
  /// The launch of a sweep's trial, on a part of the ranks.
  Launch(const Launch& whole, detail::launch::LaunchPart part);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch();

  /// The parser, to which the program may add its own options before run(). A program that is compiled with another
  /// CLI11 than muster does not link: the layout of its parser may differ (docs/installing.md).
  CLI::App& app(detail::launch::ThisCli11 = {});

  /// Parses the command line, calls `body` on every rank and returns the exit code for main, the same on all ranks: 0,
  /// the code that `body` returns, the code of an Error, or 1 for any other exception. An error is printed once. `body`
  /// returns nothing, an int, or an object with an exit code. May be called once. Afterwards the process may end in any
  /// way: by std::exit or quick_exit, and with a Launch that is static or never destroyed. Under `muster run` a code of
  /// 0 is final, whatever the process does then, unless the program has initialised MPI itself; mpirun alone takes
  /// _exit for a failure.
  template <class Body>
  int run(Body&& body) {
    return run_body([&]() -> int {
      using Returned = std::invoke_result_t<Body>;
      if constexpr (std::is_void_v<Returned>) {
        std::forward<Body>(body)();
        return 0;
      } else if constexpr (HasExitCode<Returned>) {
        const auto ended = std::forward<Body>(body)();
        print(ended.error);
        return static_cast<int>(ended.exit_code());
      } else {
        return static_cast<int>(std::forward<Body>(body)());
      }
    });
  }

  /// The communicator of all ranks of this launch.
  const Communicator& communicator() const noexcept;
  int rank() const noexcept { return communicator().rank(); }
  int size() const noexcept { return communicator().size(); }

  /// The resolved flags; valid inside run().
  const LaunchFlags& flags() const noexcept;
  /// The program's name without its folder.
  const std::string& program() const noexcept;
  /// Threads of torch that a rank should use: --threads, OMP_NUM_THREADS, or cpus_per_rank().
  int threads_per_rank() const noexcept;
  /// This rank's share of the CPUs on which it may run: each CPU is divided by the number of the node's ranks that may
  /// use it. Not more than this rank's part of the processor time that a control group grants.
  int cpus_per_rank() const noexcept;
  /// This process's number, from 0 on, among the processes of the whole launch on its node; it selects the GPU.
  int local_process_index() const noexcept;
  /// Inside run(): the processes of the whole launch on this host, not only of a sweep's trial.
  const std::set<pid_t>& processes_of_host() const noexcept;
  /// Returns the number of the next trainer in this launch, from 1 on. From 2 on, it is the suffix of the run's name
  /// under --name.
  int next_trainer_number() noexcept;
  /// Callbacks that receive the events of every run of this launch, in addition to the run's own callbacks; used by
  /// sweeps.
  const std::vector<std::shared_ptr<Callback>>& callbacks() const noexcept;
  /// True if this rank has been asked to stop: by SIGUSR1 or SIGUSR2 (mpirun, srun and scancel forward them), by SIGHUP
  /// unless it is ignored (nohup), by SIGTERM if srun or, in a batch job, `muster run` has started the ranks, or by the
  /// time limit. A session's workers tell each other and stop at the same place. The run ends with ExitCode::stopped
  /// or, if nothing could be saved, ExitCode::retry; see Session. Under mpirun alone, SIGTERM to mpirun or to a rank
  /// ends all ranks within two seconds, whatever the program does.
  ///
  /// Signals are noted from the moment the Launch is made; muster handles none before, so they have their usual effect.
  /// If one of these signals ends a rank before that, `muster run` counts the rank as stopped, not failed.
  bool stop_requested() const noexcept;
  /// Inside run(): the time until the limit of --time-limit or, without it, until the end of the batch job, as
  /// Slurm, PBS or LSF tell it. Negative afterwards; empty if there is no limit.
  std::optional<std::chrono::duration<double>> time_left() const noexcept;

 private:
  int run_body(const std::function<int()>& body);
  static void print(const std::optional<Error>& error);
  /// Called if some rank does not answer: prints why and ends all processes.
  [[noreturn]] void give_up(const Error& error);

  friend struct detail::launch::LaunchPart;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
