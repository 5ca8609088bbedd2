// The batches of an operator's calls: train() and validate() take them from passes over the data of register_data().
#pragma once

#include "data/sources/source.hpp"
#include "muster/dataset.hpp"
#include "muster/detail/operator.hpp"
#include "session/session_state.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::operators {

/// Returns passes whose batches have these columns, in this order; if `columns` is empty, all columns of the dataset.
std::unique_ptr<Passes> passes_over(const DatasetShard& shard, const BatchOptions& options,
                                    const std::shared_ptr<data::Source>& source, std::vector<std::string> columns);

/// The batches of train(). A call continues where the previous call has ended.
class TrainBatches final : public BatchSource {
 public:
  explicit TrainBatches(session::SessionState& session) : session_(session) {}

  /// Replaces the passes. An open pass ends, also one that a resumed run has yet to continue. Throws an Error inside a
  /// call.
  void set_passes(std::unique_ptr<Passes> passes);
  Passes* passes() const noexcept { return passes_.get(); }
  /// While `keeps` is true, set_passes() and set_epoch_count() do not change the position in the data. A resumed run
  /// sets it while it repeats calls that register data: these were made before the restored position was saved.
  void keep_position(bool keeps) noexcept { keeps_position_ = keeps; }
  /// Throws an Error if a call for `limit` batches cannot begin. `has_model`: true if the operator has a model; only
  /// for the text of the error about missing data.
  void check_call(std::optional<std::int64_t> limit, bool has_model) const;
  /// Begins a call for `limit` batches, or for the rest of the pass, and makes its first batch the current one.
  void begin_call(std::optional<std::int64_t> limit);
  void end_call();
  Batch* next() override;

  /// Number of passes that have begun.
  std::int64_t epoch_count() const noexcept { return epochs_; }
  /// Sets epoch_count(). The next batch begins a new pass.
  void set_epoch_count(std::int64_t epochs);

  /// For a checkpoint in the middle of a call: whether a pass is open, and the number of batches that the call has
  /// taken.
  bool has_open_pass() const noexcept { return open_; }
  std::int64_t batches_taken() const noexcept { return taken_; }
  /// Restores what has_open_pass() and batches_taken() returned when the checkpoint was saved: if a pass was open, the
  /// next batch continues it. Call it after set_epoch_count().
  void restore(bool open, std::int64_t taken) {
    resumes_ = open;
    taken_ = taken;
  }
  /// True if the next batch continues the pass that was open when the checkpoint was saved.
  bool resumes_open_pass() const noexcept { return resumes_; }

 private:
  Batch* take();

  session::SessionState& session_;
  std::unique_ptr<Passes> passes_;
  std::int64_t epochs_ = 0;
  bool in_call_ = false;
  bool open_ = false;
  bool resumes_ = false;  ///< true if the next Passes::begin() must continue the pass that the checkpoint has open
  bool keeps_position_ = false;
  std::optional<std::int64_t> limit_ = {};
  std::int64_t taken_ = 0;
  std::optional<Batch*> first_ = {};  ///< the call's first batch; none when next() has returned it
};

/// The batches of validate(). Each call, and each iteration within a call, starts at the beginning of the data.
class ValidationBatches final : public BatchSource {
 public:
  /// Replaces the passes. Throws an Error inside a call.
  void set_passes(std::unique_ptr<Passes> passes);
  Passes* passes() const noexcept { return passes_.get(); }
  /// See TrainBatches::check_call().
  void check_call(std::optional<std::int64_t> limit, bool has_model) const;
  void begin_call(std::optional<std::int64_t> limit, std::int64_t epoch);
  void end_call();
  Batch* first() override;
  Batch* next() override;

 private:
  std::unique_ptr<Passes> passes_;
  Batch* current_batch();
  void end_pass();

  std::int64_t epoch_ = 0;
  bool in_call_ = false;
  bool open_ = false;  ///< true if a pass has begun and not ended
  std::optional<std::int64_t> limit_ = {};
  std::int64_t taken_ = 0;
};

}  // namespace muster::detail::operators
