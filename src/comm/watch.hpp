// What the ranks of a world know of each other's calls: who is late when one has waited too long, and where it stands.
//
// The ranks of a node read each other's records (watch/record.hpp) in shared memory; between nodes they ask, and the
// thread of a rank answers for all of its node, whatever its main thread does.
#pragma once

#include "comm/pool.hpp"
#include "comm/world.hpp"
#include "watch/process.hpp"
#include "watch/record.hpp"

#include <mpi.h>

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

/// A call that a rank waits in.
struct WaitedFor {
  std::uint64_t channel = 0;
  std::uint64_t turn = 0;
  /// Of the world: those that take part.
  const std::vector<int>& ranks;
};

class Watch {
 public:
  /// Collective; the ranks have all come.
  Watch(PooledCommunicator comm, const Placement& placement);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// This rank's.
  watch::Record& own() noexcept { return *records_[static_cast<std::size_t>(rank_)]; }

  /// ", in step 41 of epoch 2"; empty where there has been none.
  std::string at_step() const { return at_step(*records_[static_cast<std::size_t>(rank_)]); }

  /// Starts the thread that answers for this rank, whose main thread is the caller; it ends with the last of them.
  void answer();
  void end_answering();

  /// A wait goes on for so long as `limit` and the times that ranks have announced allow; 0 where it is over.
  struct Verdict {
    std::chrono::milliseconds more{0};
    std::string fact;     ///< "rank 1 (node) has not come: it is stopped …"
    std::string details;  ///< lines of where the late ranks stand
  };
  /// At the limit of a wait that began then: looks at all ranks that take part and keeps what it sees of each in the
  /// log of this rank. `late`: where it is known who they are. Throws an Error (ExitCode::user_error) where another
  /// rank has come with another call.
  Verdict judge(const WaitedFor& call, std::chrono::nanoseconds begun, std::chrono::milliseconds limit,
                const std::vector<int>* late = nullptr);
  /// Notes that the main thread waits in that call, until the next one that it waits in; turn 0 where it does not.
  void note_wait(std::uint64_t channel, std::uint64_t turn) noexcept;
  /// Throws an Error (ExitCode::user_error) where another rank of the node has made another call in that turn, has
  /// ended the attempt without it, or waits for this rank in another call, so that nobody need wait for the limit.
  void compare(const WaitedFor& call, std::int64_t attempt) const;

 private:
  struct Finding;
  std::vector<Finding> look(const WaitedFor& call, const std::vector<int>& ranks, const std::vector<int>* late);
  void add_stacks(std::span<Finding> findings);
  std::vector<Finding> ask_other_nodes(const WaitedFor& call, const std::vector<int>* late);
  [[noreturn]] void differ(const std::string& mine, int other, const std::string& theirs) const;
  void serve();
  void run();
  bool main_waits_in(const WaitedFor& call) const;
  static std::string at_step(const watch::Record& record);
  std::string where(const watch::Record& record) const;
  const std::string& host(int rank) const { return placement_.hosts[static_cast<std::size_t>(rank)]; }

  const PooledCommunicator comm_;
  const std::thread::id main_thread_ = std::this_thread::get_id();
  const int rank_;
  const Placement placement_;
  std::shared_ptr<void> memory_;
  std::vector<watch::Record*> records_;  ///< [rank]; null on other nodes
  bool shares_ = false;                  ///< memory among the ranks of a node, where there are several
  bool asks_ = false;                    ///< ranks of other nodes, or those whose records cannot be read
  std::mutex asking_;
  std::int64_t questions_ = 0;
  std::optional<watch::MainStack> stack_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace muster::detail::comm
