// How a run that is asked to stop stops: all workers at the same boundary, with nothing half done.
//
// A boundary is a point that all workers come to alike: the next batch of a training pass, the next epoch, a report.
// What decides there is the same on all of them: what they have told each other, never what one has heard.
#pragma once

#include "muster/communicator.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace muster::detail::train {

class StopRequest {
 public:
  /// Whether any worker has been asked to stop, as far as all of them know: the same on each at the same boundary.
  bool known() const noexcept { return known_; }
  /// What the workers have told each other by other means: the next exchange() may wait.
  void learn(bool any_asked) noexcept;
  /// At every boundary. Asks the others, but only so often that it takes no more than 1% of the time from boundary to
  /// boundary; whether it did so now. Collective.
  bool exchange(const Communicator& communicator, bool asked_here);

 private:
  using Clock = std::chrono::steady_clock;

  bool known_ = false;
  std::int64_t interval_ = 1;    ///< boundaries from one exchange to the next; the same on all workers
  std::int64_t boundaries_ = 0;  ///< since the last one
  Clock::duration cost_{};       ///< of the last one
  Clock::time_point exchanged_{};
};

/// A file in the run's folder which asks for a stop by being there. One rank looks; it needs no other way to the job.
class StopFile {
 public:
  /// It is never there.
  StopFile() = default;
  explicit StopFile(std::filesystem::path path) : path_(std::move(path)) {}
  /// Looks once a second, at most.
  bool is_there();
  /// It has been obeyed, or there is nothing left to stop.
  void remove() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  std::filesystem::path path_;
  bool seen_ = false;
  Clock::time_point looked_{};
};

/// How much of its time a run keeps for its end: for as long as it has taken at most from one boundary at which the
/// workers told each other to the next, then twice the slowest save of this job, once more for a save that is under
/// way, and a second for the rest.
class Reserve {
 public:
  using Clock = std::chrono::steady_clock;

  /// Training is at such a boundary; what is done from there to `leave()` is no way to the next.
  void come() noexcept;
  void leave() noexcept { left_ = Clock::now(); }
  /// Until something has been saved: so many bytes at 100 MB/s.
  void expect(double bytes) noexcept { expected_ = std::chrono::duration<double>(bytes / 1e8); }
  void saved(Clock::duration cost) noexcept { slowest_ = std::max(slowest_.value_or(cost), cost); }
  /// `under_way`: for how long one has been, behind training.
  std::chrono::nanoseconds length(std::optional<Clock::duration> under_way) const noexcept;
  /// Shorter than length(): the time in which a run still comes to the next boundary and saves there.
  std::chrono::nanoseconds least(std::optional<Clock::duration> under_way) const noexcept;

 private:
  std::chrono::nanoseconds saves(int number, std::optional<Clock::duration> under_way) const noexcept;

  Clock::time_point left_{};
  Clock::duration way_{};
  std::chrono::duration<double> expected_{};
  std::optional<Clock::duration> slowest_ = {};
};

/// Gradients of models that are not prepared, which wait for an optimizer's step. A checkpoint does not hold them, so
/// no run stops at a boundary where there are any. (Of a prepared model its reducer knows.) Looked at from boundary to
/// boundary: where gradients have changed and parameters have not, a backward() has added to what is still to be
/// stepped with.
class AccumulatedGradients {
 public:
  /// Whether any of these models has some; each is given by its parameters.
  bool any(const std::vector<std::vector<at::Tensor>>& models);

 private:
  struct Model {
    std::size_t parameters = 0, gradients = 0;  ///< hashes of their bytes
    bool spent = false;                         ///< the optimizer has stepped with the gradients
  };
  std::map<const void*, Model> models_;  ///< by the first parameter
};

/// What a session knows of its stop.
struct Stopping {
  StopRequest request = {};
  StopFile file = {};
  Reserve reserve = {};
  std::int64_t averaging_passes = 0;  ///< of all models, at the last boundary
  AccumulatedGradients accumulated = {};
  int boundaries_with_gradients = 0;                  ///< one after the other, since the request is known
  std::weak_ptr<const StateEntries> last_state = {};  ///< restored or reported
  bool files_reported = false;                        ///< of the user's own
  bool told = false;                                  ///< should_stop() or preemption() has said so
  bool stopped = false;                               ///< training has ended so
  bool ended = false;                                 ///< by the word of a callback
  bool in_calls = false;       ///< an operator's, each of which comes to its end: it looks at `ended` by itself
  bool at_end_of_pass = true;  ///< is a boundary; not where a call ends there, with a report of all its batches
};

/// Leads out of the training function where training is done by the word of a callback.
class TrainingEnded final : public Error {
 public:
  TrainingEnded() : Error(ExitCode::done, "training ends here, as a callback has asked") {}
};

}  // namespace muster::detail::train
