// The scope object of main: while it lives, MPI is alive.
//
//   int main(int argc, char** argv) {
//     muster::Launch launch(argc, argv);
//     int width = 64;
//     launch.app().add_option("--width", width);          // needs <CLI/CLI.hpp>
//     return launch.run([&] { return muster::TorchTrainer(launch, train, {…}).fit(); });
//   }
#pragma once

#include <muster/communicator.hpp>
#include <muster/error.hpp>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace muster {

class Callback;
namespace detail::launch {
struct Part;
}

enum class Progress { automatic, bar, plain, none };
enum class Resume { automatic, never, must, path };

/// The flags that every program has, as resolved: flag, then environment (MUSTER_NAME for --name, …), else empty, so
/// that what the program sets holds.
///
/// They are the same on all ranks. What a rank was not given, by flag or environment, it takes from rank 0; another
/// value than rank 0's is an error (ExitCode::usage), except of --threads and --log-level. So it is with options of the
/// program's own that have a variable called MUSTER_…; other options may differ.
struct LaunchFlags {
  std::optional<std::filesystem::path> storage;
  std::optional<std::string> name;
  std::optional<std::filesystem::path> config_file;
  std::vector<std::string> set;  ///< "key.path=VALUE"
  Resume resume = Resume::automatic;
  std::filesystem::path resume_path;  ///< with Resume::path
  std::uint64_t seed = 0;
  std::optional<int> workers;
  std::optional<int> threads;
  std::optional<std::string> backend;
  std::optional<std::chrono::milliseconds> timeout;
  std::optional<std::chrono::seconds> time_limit;
  Progress progress = Progress::automatic;
  std::optional<std::string> log_level;  ///< of this rank
};

/// What a program's work may end with, as a Result: its exit code, and the error behind it, which is printed once.
template <class T>
concept HasExitCode = requires(const T& ended) {
  { ended.exit_code() } -> std::same_as<ExitCode>;
  { ended.error } -> std::convertible_to<std::optional<Error>>;
};

/// Not movable: it lives in main, before and after everything else of muster, or in a program that has MPI already.
class Launch {
 public:
  /// Initialises MPI at THREAD_MULTIPLE unless it is. `version` is what --version prints after the program's name.
  /// Ends the process with ExitCode::usage where the launcher started N worlds of one rank instead of one of N.
  Launch(int argc, char** argv, const std::string& version = {});
  /// On the ranks of a communicator of the caller's, such as from_mpi() makes (muster/mpi.hpp): MPI is left as it is,
  /// and so are malloc and the end of the process. An error that the ranks agree on is run()'s exit code and no more; a
  /// rank of the launch that does not answer ends the job. SIGUSR1, SIGUSR2 and SIGHUP are the launch's while it lives,
  /// where the program has no handler of its own for them and does not ignore SIGHUP. Other ranks may do what they like
  /// meanwhile, of which threads_per_rank() does not know. Launches may follow one another; torch's seeds and number of
  /// threads stay as training has set them. Where MPI was initialised below MPI_THREAD_MULTIPLE, sweeps, gloo and NCCL
  /// are refused, and nothing is saved behind training. Collective over `ranks`.
  Launch(int argc, char** argv, const Communicator& ranks, const std::string& version = {});
  /// What a trial of a sweep trains on.
  Launch(const Launch& whole, detail::launch::Part part);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch();

  /// Takes the program's own options, before run().
  CLI::App& app();

  /// Parses the command line, calls `body` on every rank and returns the exit code for main, the same on all ranks:
  /// 0, the one that `body` returns, that of an Error, or 1 for any other exception. An error is printed once. `body`
  /// returns nothing, an int, or what has an exit code. Called once.
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

  /// All ranks.
  const Communicator& communicator() const noexcept;
  int rank() const noexcept { return communicator().rank(); }
  int size() const noexcept { return communicator().size(); }

  /// Inside run().
  const LaunchFlags& flags() const noexcept;
  /// The program's name without its folder.
  const std::string& program() const noexcept;
  /// Threads of torch that a rank should use: --threads, OMP_NUM_THREADS, or its share of the CPUs that it may run on.
  int threads_per_rank() const noexcept;
  /// This rank's share of the CPUs that it may run on: each divided by the ranks of the node that may.
  int cpus_per_rank() const noexcept;
  /// This process's place among those of the whole launch on its node: what decides which GPU it has.
  int place_on_node() const noexcept;
  /// Gives each trainer of this launch a number, from 1 on: the suffix of its run's name under --name.
  int number_trainer() noexcept;
  /// Told of every run of this launch beside the run's own: what a sweep decides by.
  const std::vector<std::shared_ptr<Callback>>& callbacks() const noexcept;
  /// Whether this rank has been asked to stop: by SIGUSR1 or SIGUSR2 (mpirun, srun and scancel forward them), by SIGHUP
  /// unless it is ignored (nohup), by SIGTERM where srun has started it, or since its time is over. A session's workers
  /// hear of it from each other, stop at the same place, and the run ends with ExitCode::stopped or, where nothing
  /// could be saved, ExitCode::retry; see Session. Under mpirun SIGTERM, to it or to a rank, ends all within two
  /// seconds, whatever a program does.
  ///
  /// The signals count from the moment that libmuster is loaded, where they had their default. A program that makes no
  /// Launch has that default back after five minutes, and may set handlers of its own at any time.
  bool stop_requested() const noexcept;
  /// Inside run(): until --time-limit is over or, where there is none, the allocation as Slurm has said in
  /// SLURM_JOB_END_TIME. Negative afterwards; empty where nothing ends it.
  std::optional<std::chrono::nanoseconds> time_left() const noexcept;

 private:
  int run_body(const std::function<int()>& body);
  static void print(const std::optional<Error>& error);
  /// Some rank does not answer: says why and ends all processes.
  [[noreturn]] void give_up(const Error& error);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
