// Takes samples from the solvers' rings into memory, on a thread of its own. Calls MPI only for solvers on other nodes.
#pragma once

#include "live/connection.hpp"
#include "live/memory.hpp"
#include "live/reservoir.hpp"
#include "muster/live.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace muster::detail::live {

/// This rank's place among the trainer's ranks, and what they have in common.
struct Stream {
  std::string token, name;
  int rank = 0, ranks = 1;
  int tag = 1;                       ///< of its channels
  bool has_other_nodes = false;      ///< true if ranks of the job that do not train are on other nodes
  bool any_has_other_nodes = false;  ///< the same of any rank of the trainer, so that all have room for as many samples
  LiveOptions options = {};
  std::uint64_t seed = 0;
};

/// How many streams of a process have a tag of their own.
constexpr int most_streams = 8000;

/// Tells the other ranks of the job which ranks of MPI_COMM_WORLD receive a stream; none: it has ended.
void announce(const Stream& stream, const std::vector<int>& world_ranks);

/// The first of a solver's samples that comes to this rank.
std::int64_t first_sample(const Stream& stream, int solver);

/// What has been sent, and dropped by the solvers.
struct Sent {
  std::int64_t sent = 0, dropped = 0, waited_ms = 0;
};

/// A solver, and the sample of it that this rank takes.
struct Solver {
  live_hello hello;
  std::vector<std::shared_ptr<Connection>> ranks;  ///< null until they have come
  std::int64_t seq = 0;                            ///< the trainer's next sample
  bool is_taking = false;
  std::int64_t number = 0;                     ///< of the sample that is being taken
  std::optional<std::int64_t> slot = {};       ///< where it goes; none if it is dropped
  bool is_ready = false, was_refused = false;  ///< all rings have come; its fields are not those of others
  bool has_died = false;                       ///< a rank has ended without a word

  live_ring& ring() const { return *ranks.front()->ring; }
  bool has_ended() const;
  bool lacks(int rank) const;  ///< true if this rank has not come yet
  bool is_closing() const;     ///< true if a rank has said that it ends: it may open the stream again
};

class Receiver {
 public:
  /// Binds this rank's address. Throws an Error (ExitCode::usage) if another Live of the job has it.
  explicit Receiver(Stream stream);
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;
  /// Tells the solvers that the trainer has ended.
  ~Receiver();

  /// Begins to receive. All ranks must have bound their addresses.
  void start();
  /// Returns when the first solver has declared its samples. Throws an Error past the timeout.
  void wait_for_solver();
  void stop_solvers();
  /// Tells the solvers that there are newer weights, and sends them to those who ask. For rank 0.
  void send_weights(std::string_view bytes);

  const Stream stream;

  // The members below are used with `mutex` locked. `changed` is notified when a sample has come or a solver has ended.
  std::mutex mutex;
  std::condition_variable changed;

  /// Throws the Error that ends the stream, if there is one.
  void check() const {
    if (error_) std::rethrow_exception(error_);
  }
  bool has_failed() const noexcept { return error_ != nullptr; }
  /// Tells the solvers with which sample to go on, if they do not know it yet, and receives after a pause().
  void resume();
  /// Changes no sample in memory until resume(), so that it can be saved.
  void pause(std::unique_lock<std::mutex>& lock);
  /// Receives after a pause(), without telling the solvers anything.
  void end_pause();
  const std::vector<LiveColumn>& columns() const noexcept { return memory_.columns; }
  Reservoir& reservoir() noexcept { return *memory_.reservoir; }
  /// True if all solvers have ended, and all of their samples for this rank have come.
  bool all_ended() const noexcept;
  /// What each solver has sent and dropped itself since the start, as far as this rank knows.
  std::vector<Sent> sent() const;
  /// The same before a restart, for all solvers.
  Sent sent_before() const noexcept { return history_.before; }
  /// For each solver, the sample after the last one that has come to this rank.
  const std::vector<std::int64_t>& next() const noexcept { return history_.next; }
  /// For a restart: what was sent before, and the samples to go on with.
  void restore(const Sent& before, const std::vector<std::int64_t>& next_samples);

  // For the transports, on the receiver's thread.

  /// What speaks against a solver's rank; empty if nothing does.
  std::string reason_to_refuse(const live_hello& hello) const;
  /// Adds a rank of a solver.
  void add(const live_hello& hello, std::shared_ptr<Connection> rank);
  /// Takes the ring of a solver's rank, null if it could not be mapped.
  void take_ring(Connection& rank, std::shared_ptr<live_ring> ring, std::int64_t bytes);
  /// Sends the newest weights to a solver's rank 0, which has asked for them.
  void send_weights(Connection& rank);

 private:
  enum class Step { done, nothing, blocked };

  void run();
  bool receive_all();
  Step receive(Solver& solver);
  Step claim(Solver& solver);
  /// The slots of the sample that is being taken are copied, if `arrived`, and empty again.
  Step finish(Solver& solver, bool arrived);
  bool serve(bool may_wait, std::chrono::microseconds pause);
  void begin(Solver& solver);
  void make_reservoir(const live_layout& layout);
  void tell_solvers();
  void end(Solver& solver);
  void wake() const;

  Descriptor event_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::vector<Solver> solvers_;
  /// What came of the solvers, by their numbers.
  struct History {
    Sent before = {};                              ///< before a restart, of all
    std::vector<Sent> ended = {};                  ///< of those that have ended
    std::map<int, bool> died = {};                 ///< of those that have ended: whether each has died
    std::vector<std::int64_t> next = {};           ///< the sample after the last one that has come to this rank
    std::vector<std::int64_t> resent_before = {};  ///< earlier samples have come before the restart
  };
  History history_;
  /// What the trainer's thread wants of this one.
  struct Wanted {
    bool knows_next = false;  ///< solvers may learn with which sample to go on
    bool stops_solvers = false, is_paused = false, is_ending = false;
  };
  Wanted wanted_;
  bool is_copying_ = false;
  Weights weights_;
  std::exception_ptr error_;  ///< why the stream ends
  struct Memory {
    std::vector<LiveColumn> columns = {};
    std::shared_ptr<std::byte> bytes = {};
    std::optional<Reservoir> reservoir = {};
  };
  Memory memory_;
  std::thread thread_;
};

}  // namespace muster::detail::live
