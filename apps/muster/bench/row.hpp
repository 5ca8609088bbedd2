// One row of a benchmark: a case that was measured with several candidates, one of which is muster.
#pragma once

#include "statistics.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::bench {

/// The candidate that the others are compared with, and its twin: the same candidate once more. Their ratio shows how
/// noisy the machine is.
inline constexpr const char* ours = "muster";
inline constexpr const char* twin = "muster again";

/// Milliseconds per operation, as ms[candidate][round]; all candidates were measured in the same rounds. A candidate
/// that has failed only has the rounds before that.
struct Timings {
  std::vector<std::string> candidates;
  std::vector<std::vector<double>> ms;
};

struct Comparison {
  std::string peer;
  double ratio = 0;  ///< median over the rounds of muster / peer; muster is faster if it is below 1; NaN without rounds
  Interval interval;
  int rounds = 0;  ///< number of rounds that muster and the peer both have
};

/// Figures of muster's passes over a dataset.
struct PassFigures {
  std::int64_t samples = 0;         ///< samples in one pass
  std::int64_t batch = 0;           ///< samples per batch
  double samples_per_s = 0;         ///< median over the rounds
  double slowest = 0, fastest = 0;  ///< samples per second in the slowest and in the fastest round
  double bytes_per_s = 0;           ///< decoded bytes; median over the rounds
  double first_batch_ms = 0;        ///< from the beginning of a pass; median over the rounds
  double waiting = 0;  ///< part of its time that a step waits for data, if it computes as long as reading takes
};

struct Row {
  std::string name;  ///< name of the case
  int rounds = 0;
  std::vector<std::pair<std::string, double>> median_ms =
      {};  ///< for each candidate except the twin; NaN if it has failed
  std::vector<Comparison> comparisons = {};
  double twin_ratio = 0;  ///< median over the rounds of muster / its twin
  std::vector<std::string> notes = {};
  std::optional<PassFigures> pass = {};  ///< set for a case that reads a dataset

  /// True if muster and its twin took about the same time. Otherwise the machine was too noisy, and the row's ratios
  /// mean nothing.
  bool valid() const { return twin_ratio >= 0.95 && twin_ratio <= 1.05; }
};

/// Makes a row from `timings`, which must have muster and its twin.
Row make_row(std::string name, const Timings& timings);
/// Adds the candidates in `timings` other than muster and its twin. They are compared with muster's times in `timings`.
void add_peers(Row& row, const Timings& timings);

void to_json(nlohmann::ordered_json& json, const Row& row);
/// Adds from a row's JSON what make_row() cannot compute: the notes and the figures of passes.
void add_details(Row& row, const nlohmann::ordered_json& json);

/// Returns "shuffled: 1200 samples/s …" for a row with PassFigures.
std::string pass_text(const Row& row);

/// Returns a line for each candidate, within 80 columns. `first`: true to print the table's headings, too.
std::string row_text(const Row& row, bool first);

/// Prints rows to stdout as they are measured.
class RowWriter {
 public:
  explicit RowWriter(bool json) : json_(json) {}
  RowWriter(const RowWriter&) = delete;
  RowWriter& operator=(const RowWriter&) = delete;
  /// Ends the JSON array, or prints the figures of passes and the notes below the table.
  ~RowWriter();

  void write(const Row& row);

 private:
  bool json_;
  bool first_ = true;
  std::vector<std::string> passes_, notes_;
};

}  // namespace muster::bench
