// The observers of a run: result.json and progress.csv, status.json, the progress line, TensorBoard's files, and the
// user's callbacks.
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

/// What the observers need to know about a run.
struct ObservedRun {
  std::filesystem::path folder;
  Progress progress = Progress::automatic;
  std::int64_t first_epoch = 0;    ///< value of the field `epoch` in rows of the first epoch
  int world_size = 1;              ///< number of workers
  Json settings = Json::object();  ///< the training function's configuration
  bool validates = false;          ///< true if rows may change after training has ended, by validations
};

/// Throws an Error (ExitCode::missing_package) if an option needs a library that muster was built without.
void require_libraries(const RunConfig& config);

/// Returns a function that puts a validation's result into the row of its report, for the time after training, when the
/// run has no Observers any more. Call it on one rank.
std::function<void(std::int64_t training_iteration, const Json& fields)> rows_after_training(
    const std::filesystem::path& folder, const RunConfig& config, const Json& settings);

class Observers {
 public:
  /// Makes this worker's observers of the run.
  Observers(bool first_worker, const ObservedRun& run, const RunConfig& config);
  /// Uses the given observers, and no callbacks.
  explicit Observers(std::vector<std::unique_ptr<Observer>> observers);

  /// Tells all observers of this worker that training starts. An Error of the first worker's observers is thrown on all
  /// workers. Collective.
  void start(const Communicator& workers, const AttemptStart& start);
  /// Tells all observers about another event: observers.tell(&Observer::checkpoint, checkpoint). Throws what an
  /// observer throws.
  template <class... Parameters, class... Arguments>
  void tell(void (Observer::*event)(Parameters...), const Arguments&... arguments) {
    for (const auto& observer : observers_) (observer.get()->*event)(arguments...);
  }
  /// Like tell(), but logs exceptions as warnings with `what`, a name for the event.
  template <class... Parameters, class... Arguments>
  void tell_and_log_errors(const char* what, void (Observer::*event)(Parameters...),
                           const Arguments&... arguments) noexcept {
    for (const auto& observer : observers_) try {
        (observer.get()->*event)(arguments...);
      } catch (...) {
        log_error(what);
      }
  }
  /// Tells all observers that training is over on this worker; `failure`: none after success. Logs exceptions as
  /// warnings.
  void finish(const std::optional<Error>& failure) noexcept;

  /// The user's callbacks; they are also among the observers.
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
