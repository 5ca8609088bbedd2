// The curve of one metric, shortened without losing its peaks.
#pragma once

#include "buckets.hpp"

#include <muster/json.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::tool::report {

/// The position of a report in its run.
struct Position {
  std::int64_t report = 0;  ///< training_iteration
  std::int64_t step = 0;    ///< global_step
  double seconds = 0;       ///< time_total_s
};

/// One column for each coordinate, as differences between neighbours, since these have fewer digits.
class PositionColumns {
 public:
  void add(const Position& position);
  /// Adds "report", "step" and "ms" to `object`.
  void move_to(Json& object);

 private:
  Json reports_ = Json::array(), steps_ = Json::array(), milliseconds_ = Json::array();
  std::int64_t report_ = 0, step_ = 0, ms_ = 0;
};

class Curve {
 public:
  explicit Curve(std::size_t most_buckets) : buckets_(most_buckets) {}

  /// `value`: NaN for a value that is not finite; the curve then has a gap.
  void add(const Position& position, double value);
  /// Returns the curve with its first and last point, and at most 3 points for each of `most_buckets` buckets: the
  /// lowest value, the highest value and a gap.
  Json to_json(std::size_t most_buckets);

 private:
  struct Point {
    std::uint64_t index = 0;  ///< position in the series
    Position position = {};
    double value = 0;
  };
  struct Bucket {
    std::optional<Point> lowest = {}, highest = {}, gap = {};
    void merge(const Bucket& later);
  };
  std::vector<Point> points() const;

  Buckets<Bucket> buckets_;
  std::uint64_t count_ = 0, gap_count_ = 0;
  std::optional<Point> first_ = {}, last_ = {};
};

}  // namespace muster::tool::report
