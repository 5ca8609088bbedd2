// What a Live is: the receiver of this rank, and how its samples are drawn.
#pragma once

#include "comm/on_ranks.hpp"
#include "live/receiver.hpp"
#include "muster/dataset.hpp"
#include "state/stateful.hpp"

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::live {

at::ScalarType type_of(const LiveColumn& column);
/// The shape of so many of its samples.
std::vector<std::int64_t> shape_of(const LiveColumn& column, std::int64_t rows);

struct LiveState {
  LiveState(Communicator trainers, Stream of, std::int64_t number)
      : launched(std::move(trainers)),
        ranks(launched),
        receiver(std::move(of)),
        options(receiver.stream.options),
        number(number) {}

  const Communicator launched;
  Communicator ranks;  ///< of the present State: a failed attempt may have left collectives of the last one unfinished
  Receiver receiver;
  const LiveOptions& options;
  std::int64_t weights_version = 0;
  bool has_solver = false;  ///< a solver's first sample has come on all ranks
  static inline std::atomic<std::int64_t> last_number{0};
  const std::int64_t number;  ///< the same on all ranks, and another one for each Live of a process
  // With the receiver's mutex locked:
  bool has_begun = false;            ///< the watermark was reached
  std::int64_t draws_after_end = 0;  ///< of this rank
  double wait_s = 0;

  int rank() const noexcept { return ranks.rank(); }
  /// Identifies this Live among all of all jobs, the same on all ranks.
  std::int64_t identity() const;
  /// Waits for the first solver. Collective at the first call.
  void require_solver();

  // How `between` is called and what is returned: as for Source::draw().
  std::optional<Batch> draw(std::int64_t count, const std::function<void()>& between);
  std::optional<Batch> draw_held_out(std::int64_t count, const std::function<void()>& between);
  /// Samples in memory by index, round and round, without drawing them.
  Batch look(std::span<const std::int64_t> indices, bool of_validation);
  /// How many samples may be drawn now, up to `count`, after all solvers have ended. With the receiver's mutex locked.
  std::int64_t draws_left(std::int64_t count);

  /// What all solvers have sent and dropped themselves, not less than what has come to any rank when it calls this.
  /// Collective.
  Sent all_sent(const Communicator& over);
  /// Collective.
  LiveLedger ledger(const Communicator& over);
};

/// Which of a stream's samples a source has.
enum class Part { training, validation, first };
Dataset dataset_of(std::shared_ptr<LiveState> state, Part part);
/// The samples in memory and their ledger, in checkpoints.
std::shared_ptr<state::Stateful> saved(std::shared_ptr<LiveState> state);

}  // namespace muster::detail::live
