// result.json and progress.csv: one row per report.
#pragma once

#include "observe/sink.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::observe {

class History final : public Sink {
 public:
  /// In the run's folder.
  explicit History(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// With all rows that are there: of a run in which nobody trains now. An Error as from read().
  static History of_all(const std::filesystem::path& folder);

  /// Keeps the rows that led to the checkpoint; drops later ones, those of another course of training, and a last line
  /// that was cut off by a crash. The row of the checkpoint's own report is taken from the checkpoint: after a crash it
  /// may be missing or another course's. Both files stay as they are until something is reported, saved or validated,
  /// or training ends: the start may yet be refused.
  void start(const Start& start) override;
  /// What cannot be written is a warning.
  void report(const Json& row, std::int64_t epochs) override;
  /// Its row names it no longer.
  void lost(const Checkpoint& checkpoint) override;
  void checkpoint(const Checkpoint&) override;
  void end() override;
  /// Both files are replaced; what cannot be written is a warning.
  void validated(std::int64_t training_iteration, const Json& fields) override;

  /// Adds a row to both files. An Error (ExitCode::retry) if it cannot be written; the next that can brings it along.
  void append(const Json& row);

  const std::vector<Json>& rows() const noexcept { return rows_; }

  /// The rows in a run's folder. An Error (ExitCode::data) names the line that is none.
  static std::vector<Json> read(const std::filesystem::path& folder);

 private:
  void remove_other_course(const Start& start);
  void rewrite(const char* warning) noexcept;
  void write_rows() const;
  void write_table() const;

  std::filesystem::path folder_;
  std::vector<Json> rows_;
  std::vector<std::string> columns_;  // of progress.csv
  bool torn_ = false;                 // the files are not as the rows: one may be there in part
};

}  // namespace muster::detail::observe
