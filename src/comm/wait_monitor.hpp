// Finds out which ranks are late when a wait takes too long, and what they are doing.
//
// The ranks of a node read each other's records (watch/record.hpp) in shared memory. Ranks of other nodes are asked by
// messages, a few on each node. If several threads may call MPI, a background thread of each asked rank answers for the
// whole node, whatever the main thread is doing.
#pragma once

#include "comm/placement.hpp"
#include "comm/pool.hpp"
#include "watch/process.hpp"
#include "watch/record.hpp"

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::comm {

/// A call in which a rank waits.
struct WaitedFor {
  std::uint64_t channel = 0;
  std::uint64_t call_number = 0;
  /// World ranks that take part in the call.
  const std::vector<int>& ranks;
};

/// Decides how long a wait past its timeout goes on, and says why.
class WaitMonitor {
 public:
  /// Collective. Call it when all ranks have come; see comm/handshake.hpp.
  WaitMonitor(PooledCommunicator comm, const Placement& placement);
  ~WaitMonitor();
  WaitMonitor(const WaitMonitor&) = delete;
  WaitMonitor& operator=(const WaitMonitor&) = delete;

  /// This rank's record.
  watch::Record& own_record() noexcept { return *records_[static_cast<std::size_t>(rank_)]; }
  /// The record of a rank of the world; null if it cannot be read from here, as on another node.
  const watch::Record* record(int rank) const noexcept { return records_[static_cast<std::size_t>(rank)]; }

  /// ", in step 41 of epoch 2"; empty before the first step.
  std::string at_step() const { return at_step(*records_[static_cast<std::size_t>(rank_)]); }

  /// Starts the thread that answers questions about this rank. Call it on the rank's main thread.
  void start_answering();
  void end_answering();
  /// Answers the questions that have come from other nodes, if no thread does: call it while this rank waits.
  void answer_in_wait();

  /// How long a wait that has reached its timeout goes on, and what keeps it waiting.
  struct Decision {
    std::chrono::milliseconds more{0};  ///< time that late ranks have announced by keep_alive(); 0: the wait is over
    std::string fact;                   ///< "rank 1 (node) has not come: it is stopped …"
    std::string details;                ///< lines that say where the late ranks are
  };
  /// Called when a wait that began at `begun` has reached its timeout. `suspended`: the time since `begun` in which
  /// this process did not run; it is added to the time that late ranks have announced. Inspects the ranks that take
  /// part and, if the wait is over, writes what each is doing to this rank's log. `late`: the late ranks, if the caller
  /// knows them. Throws an Error (ExitCode::user_error) if another rank is in a different call.
  Decision decide(const WaitedFor& call, std::chrono::nanoseconds begun, std::chrono::nanoseconds suspended,
                  std::chrono::milliseconds timeout, const std::vector<int>* late = nullptr);
  /// Records the call in which the main thread waits; call number 0 if it does not wait. Ignored on other threads.
  void note_wait(std::uint64_t channel, std::uint64_t call_number) noexcept;
  /// Throws an Error (ExitCode::user_error), before the timeout of the wait, if another rank of the node has made a
  /// different call with that call number, has ended the attempt without this call, or waits for this rank in another
  /// call.
  void compare(const WaitedFor& call, std::int64_t attempt) const;

 private:
  struct Finding;
  std::vector<Finding> inspect_node(const WaitedFor& call, const std::vector<int>& ranks, const std::vector<int>* late);
  void add_stacks(std::span<Finding> findings);
  std::vector<Finding> ask_other_nodes(const WaitedFor& call, const std::vector<int>* late);
  [[noreturn]] void throw_mismatch(const std::string& mine, int other, const std::string& theirs) const;
  void answer_questions();
  void run();
  /// True if a thread answers other nodes.
  bool thread_answers() const noexcept;
  bool main_waits_in(const WaitedFor& call) const;
  /// True if this rank must ask some ranks, since it cannot read their records.
  bool has_remote_ranks() const { return std::ranges::count(records_, nullptr) > 0; }
  static std::string at_step(const watch::Record& record);
  std::string where(const watch::Record& record) const;
  const std::string& host(int rank) const { return placement_.hosts[static_cast<std::size_t>(rank)]; }

  const PooledCommunicator comm_;
  const std::thread::id main_thread_ = std::this_thread::get_id();
  const int rank_;
  const Placement placement_;
  std::shared_ptr<void> memory_;
  std::vector<watch::Record*> records_;  ///< [rank]; null if it cannot be read from here
  bool shares_memory_ = false;           ///< true if each node's ranks share memory, or each node has one rank
  std::mutex asking_;
  std::int64_t questions_ = 0;
  std::optional<watch::MainThreadStack> stack_;  ///< takes the stack of the main thread
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace muster::detail::comm
