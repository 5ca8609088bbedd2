// Training from a running simulation: the trainer's side. The solver's side is muster_live.h.
//
//   int main(int argc, char** argv) {
//     muster::LiveWorld world;                               // mpirun -n 6 ./heat : -n 2 ./train
//     muster::Launch launch(argc, argv, world.part());
//     return launch.run([&] {
//       muster::Live live(launch, "heat", {.bytes = 1 << 30, .watermark = 64, .samples_per_epoch = 1024});
//       return muster::TorchTrainer(launch, [&](muster::Session& session) { train(session, live); },
//                                   {.datasets = {{"train", live.dataset()}}}).fit();
//     });
//   }
//
// live.dataset() is an ordinary dataset of a session, whose samples the reservoir chooses. A batch has the solvers'
// fields and parameters as columns, and the column "sample", int64 [rows, 2]: the solver and the sample's number.
#pragma once

#include <muster/dataset.hpp>
#include <muster/detail/export.hpp>
#include <muster/launch.hpp>
#include <muster/state.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace muster {

namespace detail::live {
struct LiveState;
}

/// Which samples are kept, and which of them are drawn.
enum class LiveRule {
  fifo,       ///< draws each sample once, in the order in which the samples came
  firo,       ///< draws each sample once, in random order
  reservoir,  ///< draws samples repeatedly; a new one replaces a random one that was used, never an unused one
  uniform,    ///< draws in the same way, but keeps a random subset of all samples that ever came (Vitter, "Random
              ///< sampling with a reservoir", ACM TOMS 11, 1985)
};

/// What the trainer does when a solver ends without muster_live_close(), while the job goes on. An end is an Error
/// (ExitCode::retry) that no trainer tries again in this job, where the solver cannot come back: `muster run` starts
/// the job again.
enum class LiveFault {
  go_on,  ///< goes on with the other solvers; ends if all solvers have died, and none has closed
  end,    ///< ends
};

/// The same on all ranks.
struct LiveOptions {
  /// `fifo`, `firo` and `reservoir` are the rules of Meyer et al., "High throughput training of deep surrogates from
  /// large ensemble runs" (SC 2023).
  LiveRule rule = LiveRule::reservoir;
  /// Memory of each rank for samples in bytes, those that are being received included. An Error if it does not hold
  /// `watermark` and the held-out samples.
  std::int64_t bytes = std::int64_t{1} << 30;
  /// The first batch waits until this many training samples have come, over all ranks, or all solvers have closed.
  std::int64_t watermark = 1;
  /// A sample leaves the memory after this many uses; 0: no limit. `fifo` and `firo` use each sample once.
  std::int64_t max_uses = 0;
  /// The least fraction of a batch, 0 to 1, of samples that were never used before. A batch waits for such samples
  /// while solvers run. Not allowed with `uniform`, which may throw them away unused.
  double min_fresh = 0;
  /// How many more samples are drawn, over all ranks, once all solvers have closed and their last sample has come.
  /// Empty: as many as it takes until each sample in memory was used.
  std::optional<std::int64_t> after_end = {};
  /// Samples drawn in an epoch, over all ranks; the last epoch may have fewer.
  std::int64_t samples_per_epoch = 1024;
  /// One in this many samples is held out for validation, chosen by its number; 0: none.
  std::int64_t validation_every = 0;
  /// At most this many samples are held out, over all ranks, rounded up to a multiple of the ranks. Once they are
  /// there, all later samples are used for training.
  std::int64_t validation_samples = 64;
  /// How many solvers there are: their numbers are 0 to solvers − 1. Training goes on until all of them have closed.
  int solvers = 1;
  LiveFault on_solver_death = LiveFault::go_on;
  /// Seeds the draws; empty: from the launch's --seed.
  std::optional<std::uint64_t> seed = {};
  /// A file by which solvers of other jobs of this user on this node find the trainer (muster_live_connect()). The
  /// trainer writes it, readable by this user only, when it can receive, and removes it at its end. All ranks of the
  /// trainer are on one node. A solver that has died may come back: the trainer goes on as with a slow one. Empty:
  /// solvers are in this job.
  std::string connect_file = {};
  /// How long to wait for the first solver, and later for each next sample; then an Error (ExitCode::retry).
  std::chrono::seconds timeout{300};
};

/// What has become of the samples, as in the rows of reports: over all ranks and since the run began. Each sample is
/// counted once: sent = on_its_way + waiting + used + validation + dropped_by_solver + dropped_by_trainer + lost.
struct LiveLedger {
  std::int64_t sent = 0;        ///< passed to muster_live_send() by the solvers
  std::int64_t on_its_way = 0;  ///< in the shared memory between solver and trainer
  std::int64_t waiting = 0;     ///< in the reservoir and never used
  std::int64_t used = 0;        ///< drawn at least once, whether or not they are still in the reservoir
  std::int64_t validation = 0;  ///< held out
  std::int64_t dropped_by_solver = 0;
  std::int64_t dropped_by_trainer = 0;  ///< by the rule `uniform`, or sent again after a restart
  std::int64_t lost = 0;  ///< lost with a solver that died, on their way when the run was restarted, or without room
                          ///< after a restart with fewer ranks
  std::int64_t draws = 0;
  std::int64_t in_memory = 0;  ///< in the reservoir, without those that are held out
  std::int64_t room = 0;       ///< most samples that the reservoir holds
  double solver_wait_s = 0;    ///< how long the solvers have waited for room in this start of the job, their sum
  double trainer_wait_s = 0;   ///< how long the ranks have waited for samples in this start, their mean
  bool operator==(const LiveLedger&) const = default;
};

/// Initialises MPI unless the program has, and finds the ranks that the launcher has started with this program. If the
/// constructor has initialised MPI, it has malloc keep the memory of large tensors, as a Launch of all ranks does, and
/// the destructor finalises MPI. Make it in main, before the Launch. Collective over MPI_COMM_WORLD: ranks of other
/// programs call muster_live_world() or muster_live_open().
class MUSTER_API LiveWorld {
 public:
  LiveWorld();
  LiveWorld(const LiveWorld&) = delete;
  LiveWorld& operator=(const LiveWorld&) = delete;
  ~LiveWorld();

  /// The ranks of this program, for the Launch.
  const Communicator& part() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The trainer's end of a stream. A thread takes samples from the first draw or restore until this object, its datasets
/// and its StateEntries are gone; then the solvers' sends return MUSTER_LIVE_NO_TRAINER. The thread calls MPI if a rank
/// that does not train is on another node; that needs MPI_THREAD_MULTIPLE. Make it in Launch::run(), on all ranks.
///
/// The first call of dataset(), validation(), ended() or ledger() is collective and waits until a solver has sent a
/// sample: an Error (ExitCode::retry) if none comes in time. Make all streams of a program before.
///
/// Each sample goes as a whole to one rank; the samples of a solver go to the ranks in turn.
class MUSTER_API Live {
 public:
  /// An Error (ExitCode::usage) if no rank of the job is left for a solver, if another Live has this name, if an option
  /// is out of range, or if connect_file cannot be written; (ExitCode::retry) if not all ranks of the job come in time.
  /// Collective.
  Live(const Launch& launch, const std::string& name, const LiveOptions& options = {});
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;
  ~Live();

  /// The samples to train with. A pass has samples_per_epoch draws, or fewer if the solvers have ended. Its passes are
  /// collective, and a run that is resumed continues in the middle of a pass. Dataset::read() and what uses it look at
  /// samples without drawing them. A preprocessor is fitted on the first `watermark` samples. `prefetch_batches` has no
  /// effect, and options that choose an order, such as `shuffle`, are an Error (ExitCode::usage).
  Dataset dataset() const;
  /// The samples that are held out. A pass draws validation_samples samples: each rank cycles through its own, and a
  /// rank that has none yet draws none. Name it in DataConfig::datasets_to_split, or set split_all; otherwise each rank
  /// draws that many. An Error (ExitCode::usage) without validation_every.
  Dataset validation() const;

  /// An entry of the session's State, such as {"live", live}: the samples in memory, with the ledger. In a checkpoint
  /// it takes up to LiveOptions::bytes for each rank. A run that is resumed takes the samples over, at any number of
  /// ranks; without this entry it begins with an empty reservoir. Collective.
  operator StateEntry() const;

  /// Offers weights to the solvers, which take them by muster_live_weights(): rank 0's `bytes`, such as
  /// safetensors(state_dict) of muster/weights.hpp. Newer ones replace them. Returns their version: 1, 2, …. An Error
  /// (ExitCode::retry) if memory is short. Collective.
  std::int64_t send_weights(const std::string& bytes);
  /// Asks all solvers to stop: the next send of each returns MUSTER_LIVE_STOP, at the same sample on all of its ranks.
  /// Any rank may call it.
  void stop_solvers();
  /// True if all solvers have closed and nothing is left to draw on any rank; then passes are empty. Collective.
  bool ended() const;
  /// Collective.
  LiveLedger ledger() const;

 private:
  std::shared_ptr<detail::live::LiveState> state_;
};

}  // namespace muster
