// The file status.json in the run's folder: how far training is, for people who look at it from elsewhere (`muster ls`,
// `muster inspect --follow`).
//
//   {"state": "training",            or "finished", "stopped", "failed"
//    "error": "…",                   why it failed
//    "epoch": 3, "epochs": 10,       counted from 0; epochs is 0 if it is not known
//    "consumed": 3200, "samples": 60000,   samples of this epoch
//    "global_step": 1234, "training_iteration": 3,
//    "samples_per_s": 5120.5, "epoch_s_left": 11.1, "run_s_left": 81.3,   null if not known
//    "last_report": {…},             its row in result.json
//    "best": {"val_loss": 0.12},     that of checkpoint_score_attribute in the rows, empty without one; left out with
//    validation "ranks": {…},                   the workers' times in the last steps; null if not known "time": {…},
//    "starts": […],     see time_account.hpp "world_size": 4, "host": "n1", "pid": 4711, "started": 1790000000,
//    "updated": 1790000042}   seconds since 1970
#pragma once

#include "muster/config.hpp"
#include "observe/history.hpp"
#include "observe/observer.hpp"
#include "observe/time_account.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace muster::detail::observe {

/// The run's status.json; null if there is none that can be read.
Json read_status(const std::filesystem::path& run);

/// Replaces the file at most every five seconds while training goes on, and when it ends. It is not synced: only those
/// who look at a run read it. If it cannot be written, a warning says so once.
class StatusFile final : public Observer {
 public:
  /// `score`: what the best value is of. `history`: has the rows, and is told of each moment before this object; null:
  /// the best value is left out.
  StatusFile(std::filesystem::path run, int world_size, const CheckpointConfig& score = {},
             const History* history = nullptr);

  void start(const AttemptStart& start) override;
  void batch(const EpochPosition& position) override;
  void step_window(const StepWindow& window) override { last_window_ = window; }
  void report(const Json& row, std::int64_t epochs) override;
  void failure(const Error& error) override;
  void end() override;

 private:
  using Clock = std::chrono::steady_clock;
  void write_sometimes();
  void write(const char* state, const std::string& error = {}) noexcept;
  /// Samples per second since the last write, or else in the last report; 0 if not known.
  double samples_per_second() const;
  /// Looks at the rows that have come since the last call.
  void update_best();

  std::filesystem::path run_;
  int world_size_;
  std::int64_t started_;
  TimeAccount account_;
  EpochPosition position_ = {};
  StepWindow last_window_ = {};
  Json last_report_ = nullptr;  ///< until the first report of this start, the one from which training goes on
  EpochPosition written_position_ = {};
  std::optional<Clock::time_point> written_at_ = {};
  bool is_broken_ = false;

  struct Best {
    std::string attribute;
    bool is_max = true;
    const History* history = nullptr;
    std::size_t rows_seen = 0;
    Json value = nullptr;
  } best_;
};

}  // namespace muster::detail::observe
