// Takes samples from the solvers' rings into memory, on a thread of its own. Calls MPI only for solvers on other nodes.
#pragma once

#include "live/reservoir.hpp"
#include "live/sender/channel.h"
#include "muster/error.hpp"
#include "muster/live.hpp"

#include <array>
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
#include <utility>
#include <vector>

namespace muster::detail::live {

/// A file descriptor, closed by the destructor.
class Descriptor {
 public:
  Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  operator int() const noexcept { return number_; }

 private:
  int number_;
};

/// One column of all samples in memory.
struct LiveColumn {
  std::string name;
  int type = MUSTER_LIVE_FLOAT64;
  std::vector<std::int64_t> shape = {};
  std::int64_t bytes = 8;     ///< of a sample
  std::byte* data = nullptr;  ///< [samples in memory] of `bytes` each
};

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

class Receiver {
 public:
  /// Binds this rank's address. Throws an Error (ExitCode::usage) if another Live of the job has it.
  explicit Receiver(Stream stream);
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;
  /// Tells the solvers that the trainer has ended.
  ~Receiver();

  /// Begins to receive, when all ranks have bound their addresses.
  void start();
  /// Returns when the first solver has declared its samples. Throws an Error past the timeout.
  void wait_for_solver();
  /// Throws the Error that ends the stream, if there is one. With `mutex` locked.
  void check() const {
    if (error_) std::rethrow_exception(error_);
  }
  bool has_failed() const noexcept { return error_ != nullptr; }
  void stop_solvers();
  /// Tells the solvers that there are newer weights, and sends them to those who ask. For rank 0.
  void send_weights(std::string_view bytes);

  const Stream stream;

  // The members below are used with `mutex` locked. `changed` is notified when a sample has come or a solver has ended.
  std::mutex mutex;
  std::condition_variable changed;

  /// Tells the solvers with which sample to go on, if they do not know it yet, and receives after a pause().
  void resume();
  /// Changes no sample in memory until resume(), so that it can be saved.
  void pause(std::unique_lock<std::mutex>& lock);
  /// Receives after a pause(), without telling the solvers anything.
  void end_pause() {
    if (std::exchange(is_paused_, false)) wake();
  }
  const std::vector<LiveColumn>& columns() const noexcept { return columns_; }
  Reservoir& reservoir() noexcept { return *reservoir_; }
  /// True if all solvers have ended, and all of their samples for this rank have come.
  bool all_ended() const noexcept;
  struct Sent {
    std::int64_t sent = 0, dropped = 0, waited_ms = 0;
  };
  /// What each solver has sent and dropped itself since the start, as far as this rank knows.
  std::vector<Sent> sent() const;
  /// The same before a restart, for all solvers.
  Sent sent_before() const noexcept { return before_; }
  /// For a restart: what was sent before, and the samples to go on with.
  void restore(const Sent& before, const std::vector<std::int64_t>& next_samples);
  /// For each solver, the sample after the last one that has come to this rank.
  std::vector<std::int64_t> next;

 private:
  /// What a solver's rank on another node has declared, and the slots that it may send.
  struct Remote {
    int rank = 0, tag = 0;  ///< in MPI_COMM_WORLD, and of its channel
    bool is_open = true;
    live_layout layout{};
    std::int64_t answered = 0, allowed = 0;  ///< before these samples all have come, or may come
    std::int64_t end = -1;  ///< the rank has ended, and answers no sample from this one on; -1: not yet
    std::array<MPI_Request, LIVE_AHEAD> receives{};
  };
  /// A solver's rank: its ring, null until it has come, and its socket, none after it has ended.
  struct Rank {
    Descriptor socket = {};
    std::shared_ptr<live_ring> ring = {};
    std::unique_ptr<Remote> remote = {};
    bool is_closed = false;  ///< it has said that it ends

    bool is_open() const noexcept { return remote ? remote->is_open : socket >= 0; }
  };
  struct Solver {
    live_hello hello;
    std::vector<Rank> ranks;
    std::int64_t seq = 0;  ///< the next sample of this rank
    bool is_taking = false;
    std::int64_t number = 0;                     ///< of the sample that is being taken
    std::optional<std::int64_t> slot = {};       ///< where it goes; none if it is dropped
    bool is_ready = false, was_refused = false;  ///< all rings have come; its fields are not those of others
    bool has_died = false;                       ///< a rank on this node has ended without a word

    bool has_ended() const;
    bool lacks(int rank) const;  ///< true if this rank has not come yet
    bool is_closing() const;     ///< true if a rank has said that it ends: it may open the stream again
  };
  enum class Step { done, nothing, blocked };

  void run();
  bool receive_all();
  Step receive(Solver& solver);
  Step claim(Solver& solver);
  /// The slots of the sample that is being taken are copied, if `arrived`, and empty again.
  Step finish(Solver& solver, bool arrived);
  void serve_events(bool may_wait);
  bool serve_channel();
  void serve(const live_message& message, int source);
  bool receive_slots(const Solver& solver, Rank& rank);
  void accept_one();
  void greet(Descriptor socket);
  std::string reason_to_refuse(const live_hello& hello) const;
  void add(const live_hello& hello, Rank rank);
  void read_from(Solver& solver, Rank& rank);
  void take_ring(Solver& solver, Rank& rank, std::shared_ptr<live_ring> ring, std::int64_t bytes);
  void leave(Rank& rank);
  void begin(Solver& solver);
  void make_memory(const live_layout& layout);
  void tell_solvers();
  void end(Solver& solver);
  void wake() const;
  static void wake(const Rank& rank);
  void tell(const Rank& rank) const;
  void send_weights(const Rank& rank);

  Descriptor listener_, event_;
  std::vector<Descriptor> strangers_;  ///< connections that have not said who they are
  std::vector<Solver> solvers_;
  std::unique_ptr<live_channel, void (*)(live_channel*)> channel_{nullptr, live_channel_close};  ///< to other nodes
  std::chrono::steady_clock::time_point accepts_from_{};  ///< later, after it was out of file descriptors
  std::chrono::steady_clock::time_point last_message_{};
  std::map<int, bool> ended_;                ///< the numbers of solvers that have ended: whether each has died
  Sent before_;                              ///< before a restart
  std::vector<Sent> ended_sent_;             ///< [solvers] that have ended
  std::vector<std::int64_t> resent_before_;  ///< for each solver: earlier samples have come before the restart
  bool is_paused_ = false, is_copying_ = false, knows_next_ = false, stops_solvers_ = false, is_ending_ = false;
  /// Weights for the solvers, as a file without a name and in memory.
  struct Weights {
    Descriptor file;
    std::shared_ptr<std::byte> memory = {};
    live_weights head{};
  };
  Weights weights_;
  std::vector<std::pair<MPI_Request, std::shared_ptr<std::byte>>> weights_sends_;
  std::exception_ptr error_;  ///< why the stream ends
  std::vector<LiveColumn> columns_;
  std::shared_ptr<std::byte> memory_;
  std::optional<Reservoir> reservoir_;
  std::thread thread_;
};

}  // namespace muster::detail::live
