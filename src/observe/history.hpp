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
  /// `folder`: the run's folder. Has no rows before start().
  explicit History(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Reads all rows, for a run that is not training now. Throws Errors like read().
  static History load(const std::filesystem::path& folder);

  /// Keeps the rows that led to the checkpoint; drops later ones, those of another course of training, and a last line
  /// that was cut off by a crash. The row of the checkpoint's own report is taken from the checkpoint: after a crash it
  /// may be missing or another course's. Both files stay as they are until something is reported, saved or validated,
  /// or training ends: the start may yet be refused.
  void start(const AttemptStart& start) override;
  /// Logs a warning if the row cannot be written.
  void report(const Json& row, std::int64_t epochs) override;
  /// Removes the checkpoint's name from its row.
  void checkpoint_lost(const Checkpoint& checkpoint) override;
  void checkpoint(const Checkpoint&) override;
  /// Writes the rows to the disk, before the run is marked as finished; logs a warning if they may not be there.
  void end() override;
  /// Replaces both files. Logs a warning if they cannot be written.
  void validated(std::int64_t training_iteration, const Json& fields) override;
  /// The same. False if nothing has changed: the row has the fields already, or there is no such row.
  bool add_validation(std::int64_t training_iteration, const Json& fields);

  /// Adds a row to both files. Throws an Error (ExitCode::retry) if it cannot be written; the next successful append()
  /// writes that row too.
  void append(const Json& row);

  const std::vector<Json>& rows() const noexcept { return rows_; }

  /// The rows in a run's folder, without what a crash has left of others. Throws an Error (ExitCode::data) that names
  /// the first line that is not a row.
  MUSTER_INTERNAL_API static std::vector<Json> read(const std::filesystem::path& folder);
  /// The same, with the row of a checkpoint's report if the file ends before it, as a loss of power may leave it. Warns
  /// of rows before it that are missing. `saved`: that row, or null.
  static std::vector<Json> read(const std::filesystem::path& folder, const Json& saved);

 private:
  void remove_abandoned_rows(const AttemptStart& start);
  /// What becomes of a file that already holds the rows, as it mostly does when a run resumes: a durable write takes as
  /// long as a step.
  enum class Unchanged { kept, replaced };
  void rewrite(const char* warning, Unchanged unchanged = Unchanged::kept) noexcept;
  /// Writes a file. One with a second hard link is replaced in any case: rows will be appended to it, and the other
  /// link belongs to a backup (cp -al).
  void write(const char* name, const std::string& text, Unchanged unchanged) const;
  void write_rows(Unchanged unchanged) const;
  void write_table(Unchanged unchanged) const;

  std::filesystem::path folder_;
  std::vector<Json> rows_;
  std::vector<std::string> columns_;  // columns of progress.csv
  bool is_outdated_ = false;          // the files may differ from rows_, or hold a row in part; write both anew
};

}  // namespace muster::detail::observe
