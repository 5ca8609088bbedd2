// One row of a benchmark: a case, measured with several candidates, one of which is muster.
#pragma once

#include "statistics.hpp"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::bench {

/// The candidate with which the others are compared, and its twin: the same candidate once more, whose ratio shows the
/// machine's noise.
inline constexpr const char* ours = "muster";
inline constexpr const char* twin = "muster again";

/// Milliseconds of one operation: ms[candidate][round], all taken in the same rounds. A candidate that has failed has
/// only the rounds before that.
struct Timings {
  std::vector<std::string> candidates;
  std::vector<std::vector<double>> ms;
};

struct Comparison {
  std::string peer;
  double ratio = 0;  ///< median over the rounds of muster / peer: below 1, muster is faster; NaN if there are none
  Interval interval;
  int rounds = 0;  ///< that both have
};

/// What muster's passes over a dataset gave.
struct PassFigures {
  std::int64_t samples = 0;         ///< of one pass
  std::int64_t batch = 0;           ///< samples at once
  double samples_per_s = 0;         ///< median over the rounds
  double slowest = 0, fastest = 0;  ///< samples per second of the slowest and of the fastest round
  double bytes_per_s = 0;           ///< of decoded values; median over the rounds
  double first_batch_ms = 0;        ///< from the begin of a pass; median over the rounds
  double waiting = 0;               ///< share of the time of steps that compute as long as reading a batch takes
};

struct Row {
  std::string name;  ///< the case's name
  int rounds = 0;
  std::vector<std::pair<std::string, double>> median_ms =
      {};  ///< for each candidate except the twin; NaN if it has failed
  std::vector<Comparison> comparisons = {};
  double twin_ratio = 0;  ///< median over the rounds of muster / its twin
  std::vector<std::string> notes = {};
  std::optional<PassFigures> pass = {};  ///< of a case that reads a dataset

  /// True if muster and its twin took the same time; otherwise the machine was too noisy, and no ratio of the row
  /// counts.
  bool valid() const { return twin_ratio >= 0.95 && twin_ratio <= 1.05; }
};

/// Makes a row from `timings`, which must contain muster and its twin.
Row make_row(std::string name, const Timings& timings);
/// Adds the peers in `timings`, which were measured together with muster in separate rounds.
void add_peers(Row& row, const Timings& timings);

void to_json(nlohmann::ordered_json& json, const Row& row);
/// Adds what is not made of timings, from the JSON of such a row: notes and figures of passes.
void add_details(Row& row, const nlohmann::ordered_json& json);

/// "shuffled: 1200 samples/s …", for a row with PassFigures.
std::string pass_text(const Row& row);

/// A line for each candidate, within 80 columns. `first`: with the headings of the table.
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
