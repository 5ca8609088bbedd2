// What the time of a run was spent on, over all of its starts. It is kept in status.json:
//
//   "time": {"training_s": 3600.5,   training, over all starts
//            "repeated_s": 120.0,    part of it: steps that were repeated, since a start resumed from a checkpoint
//            "data_s": 30.1, "saves_s": 12.2, "late_s": 60.7,   parts of the rest: waiting for batches, saving, waiting
//                                    for the slowest worker; the first and the last only until the last report
//            "starting_s": 14.0,     from the start of a process, or from the end of its last training, to training
//            "idle_s": 300.0}        while no job trained the run
//   "starts": [{"started": 1790000000.5, "ended": 1790000042.1,   seconds since 1970; `ended`: the last sign of life
//               "world_size": 4, "first_iteration": 12, "first_step": 480,   report and step from which it resumed
//               "first_time_total_s": 3480.0,   training time of the run up to that step
//               "state": "failed", "error": "…"}]   "training", "finished", "stopped", "failed"; "died" if it has ended
//               without writing its end
//
// training_s − repeated_s − data_s − saves_s − late_s is the useful time. Only the last 200 starts are listed.
#pragma once

#include "observe/observer.hpp"
#include "watch/time_use.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>

namespace muster::detail::observe {

class TimeAccount {
 public:
  /// `run`: the run's folder. start() reads what earlier starts have written to status.json and result.json there.
  TimeAccount(std::filesystem::path run, int world_size) : run_(std::move(run)), world_size_(world_size) {}
  TimeAccount(const TimeAccount&) = delete;
  TimeAccount& operator=(const TimeAccount&) = delete;
  ~TimeAccount();

  /// Call this and the following functions on the thread that trains.
  void start(const AttemptStart& start);
  void report(const Json& row);
  /// Adds "time" and "starts" to the contents of status.json, with this start's state and its error, if there is one.
  /// If start() was not called, takes them over from the present file.
  void add_to(Json& status, const std::string& state, const std::string& error) const;

 private:
  using Clock = std::chrono::steady_clock;

  /// Returns repeated_s for this start. `before`: the value of earlier starts. `time_total_s`: see AttemptStart.
  double repeated_after(double before, double time_total_s) const;

  std::filesystem::path run_;
  int world_size_;
  bool has_started_ = false;
  Json earlier_starts_ = Json::array();
  AttemptStart attempt_ = {};
  double started_ = 0;  ///< seconds since 1970
  Clock::time_point began_ = Clock::now();
  double earlier_training_s_ = 0, repeated_s_ = 0, starting_s_ = 0, idle_s_ = 0;
  /// In seconds, summed over the reports that no start has repeated. `saves` has only reports of earlier starts; the
  /// saves of this start are in watch::time_use().
  struct {
    double data = 0, saves = 0, late = 0;
  } spent_ = {};
  watch::TimeUse at_start_ = {};  ///< time use of the thread that trains, when training began
};

}  // namespace muster::detail::observe
