// The batches of an operator's calls: passes over the data of register_data(), cut by train() and validate().
#pragma once

#include "data/sources/source.hpp"
#include "muster/dataset.hpp"
#include "muster/detail/operator.hpp"
#include "train/session_state.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::train {

/// Batches with these columns, in this order; all of the dataset where there are none.
std::unique_ptr<Passes> passes_over(const DatasetShard& shard, const BatchOptions& options,
                                    const std::shared_ptr<data::Source>& source, std::vector<std::string> columns);

/// What train() takes, call after call.
class TrainFeed final : public Feed {
 public:
  explicit TrainFeed(SessionState& session) : session_(session) {}

  /// In place of those before, of which a pass under way is over. An Error inside a call.
  void set_passes(std::unique_ptr<Passes> passes);
  Passes* passes() const noexcept { return passes_.get(); }
  /// An Error where a call for so many batches cannot begin. `has_model`: whether the operator has one, for the error
  /// where there is no data.
  void check_call(std::optional<std::int64_t> limit, bool has_model) const;
  /// A call begins, for so many batches, or for those that are left of a pass. Takes the first one.
  void begin_call(std::optional<std::int64_t> limit);
  void end_call();
  Batch* next() override;

  /// Passes begun so far.
  std::int64_t epochs() const noexcept { return epochs_; }
  /// As many were, and the next one to come is begun.
  void go_to(std::int64_t epochs);

  /// For a run that goes on in the middle of a call: whether a pass is under way, and the batches of the call so far.
  bool open() const noexcept { return open_; }
  std::int64_t taken() const noexcept { return taken_; }
  /// And back, after go_to().
  void restore(bool open, std::int64_t taken) {
    resumes_ = open;
    taken_ = taken;
  }
  bool resumes() const noexcept { return resumes_; }

 private:
  Batch* take();

  SessionState& session_;
  std::unique_ptr<Passes> passes_;
  std::int64_t epochs_ = 0;
  bool in_call_ = false;
  bool open_ = false;
  bool resumes_ = false;  ///< the next pass to begin is the one that was open
  std::optional<std::int64_t> limit_ = {};
  std::int64_t taken_ = 0;
  std::optional<Batch*> first_ = {};  ///< of the call, which has not asked for it yet
};

/// What validate() takes: each call, and each iteration in it, from the beginning of the data.
class ValidationFeed final : public Feed {
 public:
  /// In place of those before. An Error inside a call.
  void set_passes(std::unique_ptr<Passes> passes);
  Passes* passes() const noexcept { return passes_.get(); }
  /// See TrainFeed.
  void check_call(std::optional<std::int64_t> limit, bool has_model) const;
  void begin_call(std::optional<std::int64_t> limit, std::int64_t epoch);
  void end_call();
  Batch* first() override;
  Batch* next() override;

 private:
  std::unique_ptr<Passes> passes_;
  Batch* in_hand();
  void end_pass();

  std::int64_t epoch_ = 0;
  bool in_call_ = false;
  bool open_ = false;  ///< a pass is under way
  std::optional<std::int64_t> limit_ = {};
  std::int64_t taken_ = 0;
};

}  // namespace muster::detail::train
