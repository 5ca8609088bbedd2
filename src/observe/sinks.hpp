// The sinks of a run: result.json and progress.csv, the progress line.
#pragma once

#include "muster/communicator.hpp"
#include "muster/launch.hpp"
#include "observe/progress_line.hpp"
#include "observe/sink.hpp"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::observe {

class Sinks {
 public:
  /// Makes this worker's sinks. `run`: the run's folder; `first_epoch`: the `epoch` of its first row.
  Sinks(bool first_worker, const std::filesystem::path& run, Progress progress, std::int64_t first_epoch);
  /// Uses the given sinks.
  explicit Sinks(std::vector<std::unique_ptr<Sink>> sinks) : sinks_(std::move(sinks)) {}

  /// Tells all sinks that training starts. An Error of the first worker's sinks is thrown on all workers. Collective.
  void start(const Communicator& workers, const AttemptStart& start);
  /// Tells all sinks of any other event: sinks.tell(&Sink::checkpoint, checkpoint). An exception of a sink ends
  /// training.
  template <class... Parameters, class... Arguments>
  void tell(void (Sink::*moment)(Parameters...), const Arguments&... arguments) {
    for (const auto& sink : sinks_) (sink.get()->*moment)(arguments...);
  }
  /// Training is over on this worker, with an error or without. Logs what a sink throws as a warning.
  void finish(const std::optional<Error>& failure) noexcept;

  /// A batch of the epoch is done. Only the progress line is told of each batch.
  void batch(const EpochPosition& position) {
    if (line_ != nullptr) line_->batch(position);
  }

 private:
  std::vector<std::unique_ptr<Sink>> sinks_;
  ProgressLine* line_ = nullptr;
};

}  // namespace muster::detail::observe
