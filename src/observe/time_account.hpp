// Where the time of a run has gone, over all of its starts. It is kept in status.json:
//
//   "time": {"training_s": 3600.5,   in training, over all starts
//            "repeated_s": 120.0,    of that, in steps that were done again because a start went back to a checkpoint
//            "data_s": 30.1, "saves_s": 12.2, "late_s": 60.7,   of the rest: waiting for batches, saving, waiting for
//                                    the slowest worker; as far as reports have told
//            "starting_s": 14.0,     from the start of a process, or the end of its training before, to training
//            "idle_s": 300.0}        while no job trained the run
//   "starts": [{"started": 1790000000.5, "ended": 1790000042.1,   seconds since 1970; `ended`: the last sign of life
//               "world_size": 4, "first_iteration": 12, "first_step": 480,   what counted when it began
//               "state": "failed", "error": "…"}]   "training", "finished", "stopped", "failed"; "died" if it could not
//               say
//
// training_s − repeated_s − data_s − saves_s − late_s is useful time: steps that count.
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
  /// Reads what earlier starts have left in status.json and result.json of the run's folder `run`.
  TimeAccount(std::filesystem::path run, int world_size) : run_(std::move(run)), world_size_(world_size) {}
  TimeAccount(const TimeAccount&) = delete;
  TimeAccount& operator=(const TimeAccount&) = delete;
  ~TimeAccount();

  /// Call it and the others on the thread that trains.
  void start(const AttemptStart& start);
  void report(const Json& row);
  /// Adds "time" and "starts" to the content of status.json, with the start's state and its error, if there is one. If
  /// start() was not called, they stay what they were.
  void add_to(Json& status, const std::string& state, const std::string& error) const;

 private:
  using Clock = std::chrono::steady_clock;

  double repeated_after(double before, double time_total_s) const;

  std::filesystem::path run_;
  int world_size_;
  bool has_started_ = false;
  Json earlier_starts_ = Json::array();
  AttemptStart attempt_ = {};
  double started_ = 0;  ///< seconds since 1970
  Clock::time_point began_ = Clock::now();
  double earlier_training_s_ = 0, repeated_s_ = 0, starting_s_ = 0, idle_s_ = 0;
  /// In seconds, of the reports that count; `saves` without those of this start.
  struct {
    double data = 0, saves = 0, late = 0;
  } spent_ = {};
  watch::TimeUse at_start_ = {};  ///< of the thread that trains
};

}  // namespace muster::detail::observe
