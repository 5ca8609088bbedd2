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
  /// Makes those that run on this worker; `run` is the run's folder, `first_epoch` the `epoch` of its first row.
  Sinks(bool first_worker, const std::filesystem::path& run, Progress progress, std::int64_t first_epoch);
  /// For a list of one's own.
  explicit Sinks(std::vector<std::unique_ptr<Sink>> sinks) : sinks_(std::move(sinks)) {}

  /// An error of the first worker's sinks is the same on all workers. Collective.
  void start(const Communicator& workers, const Start& start);
  /// Any other moment of training: sinks.tell(&Sink::checkpoint, checkpoint). What a sink throws ends training.
  template <class... Parameters, class... Arguments>
  void tell(void (Sink::*moment)(Parameters...), const Arguments&... arguments) {
    for (const auto& sink : sinks_) (sink.get()->*moment)(arguments...);
  }
  /// Training is over on this worker, with an error or without. What a sink throws is a warning.
  void finish(const std::optional<Error>& failure) noexcept;

  /// A batch of the epoch is done: only the progress line wants to know so often.
  void batch(const EpochPosition& position) {
    if (line_ != nullptr) line_->batch(position);
  }

 private:
  std::vector<std::unique_ptr<Sink>> sinks_;
  ProgressLine* line_ = nullptr;
};

}  // namespace muster::detail::observe
