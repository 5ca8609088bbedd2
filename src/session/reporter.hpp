// A report: reduces metrics over the workers, saves a checkpoint if there is something to save, gives the observers a
// row, and stops the run if a worker was asked to.
#pragma once

#include "muster/checkpoint.hpp"
#include "muster/session.hpp"
#include "muster/state.hpp"
#include "run/run_folder.hpp"
#include "session/accumulated_gradients.hpp"
#include "session/bad_numbers.hpp"
#include "session/callback_end.hpp"
#include "session/epoch_end.hpp"
#include "session/late_ranks.hpp"
#include "session/outputs.hpp"
#include "session/prepared_models.hpp"
#include "session/resumer.hpp"
#include "session/same_passes.hpp"
#include "session/saved_values.hpp"
#include "session/saver.hpp"
#include "session/session_data.hpp"
#include "session/stopper.hpp"
#include "session/training_progress.hpp"
#include "session/worker_context.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::session {

class Reporter {
 public:
  /// The parts of the session. A report has something to do with each of them.
  struct Parts {
    const run::RunFolder& run;
    const WorkerContext& workers;
    TrainingProgress& progress;
    SessionData& data;
    const PreparedModels& models;
    AccumulatedGradients& gradients;
    SavedValues& saved_values;
    Outputs& outputs;
    SamePasses& same_passes;
    EpochEnd& epoch_end;
    Resumer& resumer;
    Saver& saver;
    Stopper& stopper;
    CallbackEnd& callback_end;
    std::optional<LateRanks>& late_ranks;
    const std::shared_ptr<BadNumbersWatch>& bad_numbers;
  };
  explicit Reporter(Parts session) : session_(session) {}

  /// What this worker gives to a report.
  struct Input {
    const Metrics& metrics;
    std::shared_ptr<const StateEntries> entries = {};  ///< null without a State
    std::optional<Checkpoint> files = {};
    ReportOptions options = {};
  };
  /// Session::report(). Collective.
  void report(const Input& input);

 private:
  /// What all workers have given together. The same on each of them.
  struct Combined {
    std::vector<Json> metrics = {};  ///< of each rank, weighted
    bool has_state = false, has_files = false, validates = false;
    bool is_saving = false;  ///< the checkpoint before is still being written
    bool has_callbacks = false;
    std::vector<observe::RankTimes> times = {};   ///< of each rank, since the last report
    std::vector<std::int64_t> memory_bytes = {};  ///< of each rank
  };

  /// A report, as far as it is made.
  struct Made {
    Combined all = {};
    Json row = {};
    bool saves = false;
    bool has_begun_to_save = false;  ///< its own checkpoint, not that of the report before
    std::optional<Checkpoint> saved = {};
  };
  struct Before;

  /// Checks that a report may be made now.
  void begin(bool has_state);
  /// Checks the input of all workers and combines it. Collective.
  Combined exchange(const Input& input);
  /// Collective.
  void require_own_metrics(const Json& row) const;
  void warn_of_different_steps(const std::vector<std::int64_t>& steps);
  /// Waits for the checkpoint that is being written, if it must be over. True if this report saves one. Collective.
  bool wait_for_save_before(const Combined& all);
  /// The row of this report, the same on all workers. Collective.
  Json make_row(const Combined& all, bool reduce);
  /// Gives the observers the values of all parameters and gradients, if that is asked for. Collective.
  void log_histograms();
  /// Saves and adds the checkpoint's name to the row. Collective.
  Checkpoint save(const Input& input, const Combined& all, Json& row);
  /// All that may fail. Collective.
  void make(const Input& input, Before& before, Made& report);
  bool has_committed(const Before& before) const;
  /// Sets back what a report has changed that has failed, unless its checkpoint is committed.
  void set_back(const Before& before) noexcept;
  /// Gives the observers the row, and the validation its request.
  void publish(const Json& row, const std::optional<Checkpoint>& to_validate);
  void poll_validations();

  const Parts session_;
  bool has_warned_of_steps_ = false;
};

}  // namespace muster::detail::session
