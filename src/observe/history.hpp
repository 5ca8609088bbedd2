// The files result.json and progress.csv, with one row per report.
#pragma once

#include "base/export.hpp"
#include "observe/observer.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace muster::detail::observe {

class History final : public Observer {
 public:
  /// `folder`: the run's folder. The rows of earlier starts are read in start().
  explicit History(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Reads all rows of a run that is not training now. Throws the Errors of read().
  static History load(const std::filesystem::path& folder);

  /// Keeps the rows that led to the checkpoint. Drops later rows, rows of another course of training, and a last line
  /// that a crash has cut off. The row of the checkpoint's own report is taken from the checkpoint, since after a crash
  /// it may be missing or belong to another course. The files change only when something is reported, saved or
  /// validated, or when training ends, since the start may still be refused.
  void start(const AttemptStart& start) override;
  /// Adds the row. If it cannot be written, logs a warning.
  void report(const Json& row, std::int64_t epochs) override;
  /// Removes the checkpoint's names and status from the row of its report.
  void checkpoint_lost(const Checkpoint& checkpoint) override;
  void checkpoint(const Checkpoint&) override;
  /// Syncs the files to the disk before the run is marked as finished. If that fails, logs a warning and writes them
  /// anew.
  void end() override;
  /// Puts the fields into the row with this training_iteration and replaces both files. If they cannot be written, logs
  /// a warning.
  void validated(std::int64_t training_iteration, const Json& fields) override;
  /// Like validated(). Returns false if nothing has changed: the row has the fields already, or there is no such row.
  bool add_validation(std::int64_t training_iteration, const Json& fields);

  /// Adds a row to both files. Throws an Error (ExitCode::retry) if it cannot be written; the row is kept in memory,
  /// and the next call that can write the files writes it, too.
  void append(const Json& row);

  const std::vector<Json>& rows() const noexcept { return rows_; }

  /// Returns the rows in a run's folder, without a line that a crash has cut off; none if there is no file. Throws an
  /// Error (ExitCode::data) that names the first line that is not a row.
  MUSTER_INTERNAL_API static std::vector<Json> read(const std::filesystem::path& folder);
  /// Like read(folder), but if the file ends before the row `saved`, adds that row; a power loss may leave such a file.
  /// Logs a warning if rows before `saved` are missing. `saved`: the row of a checkpoint's report, or null.
  static std::vector<Json> read(const std::filesystem::path& folder, const Json& saved);

 private:
  void remove_abandoned_rows(const AttemptStart& start);
  /// What to do with a file that already has the right contents, as is usual when a run resumes: leave it, or replace
  /// it. Replacing it takes about as long as a training step.
  enum class Unchanged { kept, replaced };
  void rewrite(const char* warning, Unchanged unchanged = Unchanged::kept) noexcept;
  /// Writes a file. A file with a second hard link is replaced in any case: rows will be appended to it, and the other
  /// link may belong to a backup (cp -al).
  void write(const char* name, const std::string& text, Unchanged unchanged) const;
  void write_rows(Unchanged unchanged) const;
  void write_table(Unchanged unchanged) const;

  std::filesystem::path folder_;
  std::vector<Json> rows_;
  std::vector<std::string> columns_;  // columns of progress.csv
  // True if the files may differ from rows_ or hold a row only in part; then both are written anew.
  bool is_outdated_ = false;
};

}  // namespace muster::detail::observe
