// result.json and progress.csv: one row per report. Kept by one rank.
#pragma once

#include "muster/json.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::observe {

class History {
 public:
  /// Reads the rows that are there and cuts both files back to those up to `training_iteration`; a last line that was
  /// cut off by a crash goes too. `last` (null or a row) is added if that iteration's row is missing, which is so after
  /// a crash between a checkpoint and its row.
  History(std::filesystem::path folder, std::int64_t training_iteration, const Json& last);

  /// Adds a row to both files. Throws an Error (ExitCode::retry) if it cannot be written; the next row that can brings
  /// it along.
  void append(const Json& row);

  const std::vector<Json>& rows() const noexcept { return rows_; }

  /// The rows in a run's folder. An Error (ExitCode::data) names the line that is none.
  static std::vector<Json> read(const std::filesystem::path& folder);

 private:
  void write_rows() const;
  void write_table() const;

  std::filesystem::path folder_;
  std::vector<Json> rows_;
  std::vector<std::string> columns_;  // of progress.csv
  bool torn_ = false;                 // a row may be there in part
};

}  // namespace muster::detail::observe
