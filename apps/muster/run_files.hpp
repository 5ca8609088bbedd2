// The files of a run that tell how far it has come.
#pragma once

#include <muster/json.hpp>

#include <cstdint>
#include <filesystem>
#include <ios>
#include <string>
#include <utility>
#include <vector>

namespace muster::tool {

/// The storage where programs started from here would put their runs: MUSTER_STORAGE, or "runs".
std::string default_storage();
/// The JSON in a file; null if there is none or it is not JSON.
Json read_json(const std::filesystem::path& path);
/// Reads the rows of a run's result.json while the run adds to it. The last line of a killed run may be incomplete, and
/// a run that is continued replaces the file and may make its last reports again.
class Reports {
 public:
  explicit Reports(std::filesystem::path run) : file_(std::move(run) / "result.json") {}
  /// Returns the rows that have come since the last call.
  std::vector<Json> read_new();

 private:
  std::filesystem::path file_;
  std::uint64_t inode_ = 0;
  std::streamoff read_ = 0;    // bytes of the file
  std::size_t row_count_ = 0;  // rows that were returned
};

/// The whole number at `key`, or 0.
std::int64_t count_at(const Json& object, const std::string& key);

/// A run at a glance.
struct RunSummary {
  std::filesystem::path path;
  std::string state = {};     ///< "training", "finished", "stopped", "failed", or "silent": neither over nor heard of
  std::string epoch = {};     ///< "3/10", counted from 1; empty if it is not known
  std::string best = {};      ///< "val_loss 0.123": the best value of the score, or the last one of the first metric
  std::int64_t reports = 0;   ///< number of reports
  std::int64_t updated = -1;  ///< the last sign of life, in seconds since 1970; -1 if there is none
  Json status = nullptr;      ///< status.json
};
RunSummary summary_of(const std::filesystem::path& run);
/// "starting", "training", "finished", "stopped", "failed", or "silent": neither over nor heard of. `status`: the run's
/// status.json. `reported`: the time of the newest report, in seconds since 1970; 0 if it is not known.
std::string state_of(const std::filesystem::path& run, const Json& status, std::int64_t reported = 0);
/// True in a state in which more may come.
bool may_go_on(const std::string& state);
Json to_json(const RunSummary& summary);

/// "epoch 3/10  45%  step 1234  5120 samples/s  12 min left", or "2 min left in the epoch" where the number of epochs
/// is not known.
std::string progress_text(const Json& status);
/// Where the time of the run has gone, over all of its starts: a line for each cause. Empty if it is not known.
std::string time_text(const Json& status);
/// The user's metrics in a row, "loss 0.1234, accuracy 0.91"; empty if there are none.
std::string metrics_text(const Json& row);
/// "report 3: loss 0.1234 accuracy 0.91".
std::string report_text(const Json& row);
/// "just now", "12 s ago", "3 min ago", "5 h ago", "2 d ago".
std::string age_text(std::int64_t updated);

}  // namespace muster::tool
