// The observers of a run: result.json and progress.csv, status.json, the progress line, TensorBoard's files, the user's
// callbacks.
#pragma once

#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "muster/launch.hpp"
#include "observe/callbacks.hpp"
#include "observe/observer.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace muster::detail::observe {

/// What the observers need to know of a run.
struct ObservedRun {
  std::filesystem::path folder;
  Progress progress = Progress::automatic;
  std::int64_t first_epoch = 0;    ///< the `epoch` of its first row
  int world_size = 1;              ///< number of workers
  Json settings = Json::object();  ///< the training function's configuration
  bool validates = false;          ///< rows may change after training has ended
};

/// Throws an Error (ExitCode::missing_package) if muster was built without a library that an option asks for.
void require_libraries(const RunConfig& config);

/// Returns what adds a validation's result to the row of its report when training has ended, and the run has no
/// Observers any more. On one rank.
std::function<void(std::int64_t training_iteration, const Json& fields)> rows_after_training(
    const std::filesystem::path& folder, const RunConfig& config, const Json& settings);

class Observers {
 public:
  /// Makes this worker's observers of the run.
  Observers(bool first_worker, const ObservedRun& run, const RunConfig& config);
  /// Uses the given observers, and no callbacks.
  explicit Observers(std::vector<std::unique_ptr<Observer>> observers);

  /// Tells all that training starts. An Error of the first worker's observers is thrown on all workers. Collective.
  void start(const Communicator& workers, const AttemptStart& start);
  /// Tells all of any other event: observers.tell(&Observer::checkpoint, checkpoint). An exception of an observer ends
  /// training.
  template <class... Parameters, class... Arguments>
  void tell(void (Observer::*moment)(Parameters...), const Arguments&... arguments) {
    for (const auto& observer : observers_) (observer.get()->*moment)(arguments...);
  }
  /// The same at a moment when nothing can be thrown: logs an exception as a warning. `what`: the event, for the
  /// warning.
  template <class... Parameters, class... Arguments>
  void tell_and_log_errors(const char* what, void (Observer::*moment)(Parameters...),
                           const Arguments&... arguments) noexcept {
    for (const auto& observer : observers_) try {
        (observer.get()->*moment)(arguments...);
      } catch (...) {
        log_error(what);
      }
  }
  /// Training is over on this worker, with an error or without. Logs what an observer throws as a warning.
  void finish(const std::optional<Error>& failure) noexcept;

  /// The user's callbacks, which are among the observers.
  Callbacks& callbacks() noexcept { return *callbacks_; }
  const Callbacks& callbacks() const noexcept { return *callbacks_; }

 private:
  void add_callbacks(std::vector<std::shared_ptr<Callback>> callbacks);
  /// Logs the exception that is being handled.
  static void log_error(const char* what) noexcept;

  std::vector<std::unique_ptr<Observer>> observers_;
  Callbacks* callbacks_ = nullptr;
};

}  // namespace muster::detail::observe
