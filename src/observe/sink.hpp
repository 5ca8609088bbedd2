// What follows a run: every sink is told of the same few moments.
#pragma once

#include "muster/checkpoint.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <cstdint>
#include <functional>
#include <string>

namespace muster::detail::observe {

/// Where an attempt of training begins.
struct Start {
  std::int64_t training_iteration = 0;  ///< the last report that counts; later reports are made again
  /// The row of that report, from the checkpoint that training goes on from. Null if there is no checkpoint, or if it
  /// was saved between two reports.
  Json last_row = nullptr;
  /// The run had given up that checkpoint and returns to it, so the reports noted since then are of another course of
  /// training.
  bool was_given_up = false;
  /// True if the checkpoint of that name is the one that training goes on from, or an earlier one of the same course.
  /// Unset if the run has no checkpoint.
  std::function<bool(const std::string&)> led_here = {};
};

/// Made for one attempt, on the first worker or on all, as sinks.cpp says. The moments come on the thread
/// of the training function: start, then epochs, reports and checkpoints, then failure or end.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void start(const Start&) {}
  /// This epoch of session.epochs() is over.
  virtual void epoch(std::int64_t /*epoch*/) {}
  /// The row as in result.json; `epochs` of session.epochs(), 0 where the training function counts by itself.
  virtual void report(const Json& /*row*/, std::int64_t /*epochs*/) {}
  /// It is committed: by a report, whose row comes next, or was there before if it was written behind training, or
  /// because the run is asked to stop.
  virtual void checkpoint(const Checkpoint&) {}
  /// A row has named this one, and it could not be written.
  virtual void lost(const Checkpoint&) {}
  /// A validation has measured the checkpoint of that report; the fields take the place of those of its row.
  virtual void validated(std::int64_t /*training_iteration*/, const Json& /*fields*/) {}
  /// This worker leaves training with that error, which may be another worker's, or a stop on request.
  virtual void failure(const Error&) {}
  virtual void end() {}
};

}  // namespace muster::detail::observe
