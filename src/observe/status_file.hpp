// The file status.json in the run's folder: how far training is, for people who look at the run from elsewhere (`muster
// ls`, `muster inspect --follow`).
//
//   {"state": "training",            or "finished", "stopped", "failed"
//    "error": "…",                   why training has failed or was stopped
//    "epoch": 3, "epochs": 10,       the epoch, from 0, and the number of epochs; 0 if unknown
//    "consumed": 3200, "samples": 60000,   samples of this epoch, so far and altogether
//    "global_step": 1234, "training_iteration": 3,
//    "samples_per_s": 5120.5, "epoch_s_left": 11.1, "run_s_left": 81.3,   null if unknown
//    "last_report": {…},             the last report's row in result.json
//    "best": {"val_loss": 0.12},     best value of checkpoint_score_attribute in the rows; empty without that option;
//                                    missing if the run has a validation function
//    "ranks": {…},                   what the workers have spent the last steps on; null if unknown
//    "time": {…}, "starts": […],     see time_account.hpp
//    "world_size": 4, "host": "n1", "pid": 4711,
//    "started": 1790000000, "updated": 1790000042}   in seconds since 1970
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

/// Returns the run's status.json; null if there is none or it cannot be read.
Json read_status(const std::filesystem::path& run);

/// Writes the file at most every five seconds while training runs, and when it ends; but not if the start is refused
/// before it has trained. The file is not synced, since no program depends on it. If it cannot be written, logs a
/// warning and writes nothing more.
class StatusFile final : public Observer {
 public:
  /// `score`: says which value is the best. `history`: has the rows; it must get each event before this object does. If
  /// it is null, the best value is left out.
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
  /// Samples per second since the last write; if unknown, the last report's samples_per_s; 0 if there is none, either.
  double samples_per_second() const;
  /// Takes the rows into account that have been added since the last call.
  void update_best();

  std::filesystem::path run_;
  int world_size_;
  std::int64_t started_;
  TimeAccount account_;
  EpochPosition position_ = {};
  StepWindow last_window_ = {};
  Json last_report_ = nullptr;  ///< before this start's first report, the row of the report from which training resumes
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
