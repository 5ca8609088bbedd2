// Reads the files of a run that tell how far it has come.
#pragma once

#include <muster/json.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace muster::tool {

/// Returns the folder in which programs started from here would put their runs: MUSTER_STORAGE, or "runs".
std::string default_storage();
/// Returns the JSON in a file; null if there is no such file or it is not JSON. Throws an Error (ExitCode::data) if the
/// file cannot be opened.
Json read_json(const std::filesystem::path& path);
/// Reads the rows of a run's result.json while the run adds to it. The last line of a killed run may be incomplete. A
/// run that resumes replaces the file and may make its last reports again.
class Reports {
 public:
  explicit Reports(std::filesystem::path run) : file_(std::move(run) / "result.json") {}
  /// Returns the rows that were added since the last call.
  std::vector<Json> read_new();

 private:
  std::filesystem::path file_;
  std::uint64_t inode_ = 0;
  std::streamoff bytes_read_ = 0;
  std::size_t row_count_ = 0;  // number of rows that were returned
};

/// Returns the number at `key` without its decimals; 0 if there is none, or if it is above 1e15.
std::int64_t count_at(const Json& object, const std::string& key);

/// The most important facts about a run.
struct RunSummary {
  std::filesystem::path path;
  std::string state = {};  ///< what state_of() returns, such as "training"
  std::string epoch = {};  ///< "3/10", counted from 1; empty if unknown
  /// "val_loss 0.123": the best value of the score; without a score, the last value of the first metric
  std::string best = {};
  std::int64_t reports = 0;   ///< number of reports
  std::int64_t updated = -1;  ///< last sign of life, in seconds since 1970; -1 if there is none
  Json status = nullptr;      ///< status.json
};
RunSummary summary_of(const std::filesystem::path& run);
/// Returns "starting", "training", "finished", "stopped", "failed", or "silent": the run has not ended, but there was
/// no sign of life for a minute (ten at its start). `status`: the run's status.json. `reported`: time of the newest
/// report, in seconds since 1970; 0 if unknown.
std::string state_of(const std::filesystem::path& run, const Json& status, std::int64_t reported = 0);
/// True if a run in this state may still make reports.
bool may_go_on(const std::string& state);
Json to_json(const RunSummary& summary);

/// Returns "epoch 3/10  45%  step 1234  5120 samples/s  12 min left"; if the number of epochs is unknown, "2 min left
/// in the epoch".
std::string progress_text(const Json& status);
/// Returns what the time of the run was spent on, over all of its starts: a line for each cause. Empty if unknown.
std::string time_text(const Json& status);
/// Returns the user's metrics in a row, "loss 0.1234, accuracy 0.91"; empty if there are none.
std::string metrics_text(const Json& row);
/// Returns "report 3: loss 0.1234 accuracy 0.91".
std::string report_text(const Json& row);
/// Returns "just now", "12 s ago", "3 min ago", "5 h ago" or "2 d ago"; "never" for a negative time.
std::string age_text(std::int64_t updated);

}  // namespace muster::tool
