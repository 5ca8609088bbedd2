// The files of a run that tell how far it has come.
#pragma once

#include <muster/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool {

/// The JSON in a file; null if there is none or it is not JSON.
Json read_json(const std::filesystem::path& path);
/// The complete rows of a run's result.json; the last line of a killed run may be incomplete.
std::vector<Json> reports_of(const std::filesystem::path& run);

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
Json to_json(const RunSummary& summary);

/// "epoch 3/10  45%  step 1234  5120 samples/s  2 min left in the epoch, 12 min in all".
std::string progress_text(const Json& status);
/// "report 3: loss 0.1234  accuracy 0.91".
std::string report_text(const Json& row);
/// "just now", "12 s ago", "3 min ago", "5 h ago", "2 d ago".
std::string age_text(std::int64_t updated);

}  // namespace muster::tool
