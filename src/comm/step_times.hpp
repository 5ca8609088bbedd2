// Collects the times of all workers at the last steps on rank 0. No rank waits for them.
//
// Ranks write the times into their records (watch/step_log.hpp), and rank 0 reads the records that it can. It cannot
// read the records of ranks on other nodes. These ranks form groups whose members can read each other's records, and
// the first rank of each group sends the group's times to rank 0.
#pragma once

#include "comm/mailbox.hpp"
#include "muster/communicator.hpp"
#include "watch/host_load.hpp"
#include "watch/step_log.hpp"

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace muster::detail::comm {

/// Notes the times of this worker's steps, and returns those of all workers on rank 0.
class StepTimes {
 public:
  /// Construct it on the thread that trains. Collective over the workers.
  explicit StepTimes(const Communicator& workers);

  /// Also counts the time in which these threads have no core; see HostLoadReader.
  void watch_threads(const std::vector<int>& threads) { load_reader_.watch_threads(threads); }
  /// Notes that this step begins on this rank; each step has the number after the one before. Takes less than a
  /// microsecond, and every 20 ms some tens of microseconds more to read what the kernel has counted.
  void note(std::int64_t step);
  /// The totals of each worker when it began the step, by rank. Empty if a worker has not begun the step, if its
  /// message has not arrived, or if the step is too long ago. Call it on rank 0, for later and later steps.
  std::optional<std::vector<watch::StepSample>> at(std::int64_t step);
  /// From now on the groups of other nodes send the times of each step that is a multiple of `interval`, a power of two
  /// that is not smaller than the previous interval. Call it on rank 0.
  void set_interval(std::int64_t interval);

 private:
  /// The key of a step in StepLog; steps of different attempts of training have different keys.
  std::uint64_t key_of(std::int64_t step) const noexcept { return attempt_ << 40 | static_cast<std::uint64_t>(step); }
  watch::StepSample sample();
  void send_group_samples(std::int64_t step);
  void receive();

  Communicator workers_;
  const std::uint64_t attempt_;
  std::vector<int> group_;          ///< workers whose records this rank can read, itself among them
  std::optional<Mailbox> mailbox_;  ///< none if rank 0 can read all records
  std::vector<int> group_leaders_;  ///< the first rank of each group but rank 0's
  std::int64_t interval_ = 1;       ///< between two steps whose times are sent
  std::int64_t next_to_send_ = 0;   ///< on the first rank of a group: the next step whose times it sends; 0 at first
  /// On rank 0: samples that have come, [step][rank]; the ranks of its own group are missing.
  std::map<std::int64_t, std::map<int, watch::StepSample>> received_;
  watch::HostLoadReader load_reader_;
  watch::HostLoad load_ = {};
  std::int64_t memory_bytes_ = 0;
  std::chrono::steady_clock::time_point load_read_at_ = {}, memory_read_at_ = {};
};

}  // namespace muster::detail::comm
