// The curve of one metric, shortened so that its peaks stay.
#pragma once

#include "buckets.hpp"

#include <muster/json.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::tool::report {

/// Where a report stands in its run.
struct Position {
  std::int64_t report = 0;  ///< training_iteration
  std::int64_t step = 0;    ///< global_step
  double seconds = 0;       ///< time_total_s
};

/// The column of each coordinate, as differences between neighbours, which are shorter than the numbers.
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

  /// `value`: NaN for one that is not finite, which is a gap.
  void add(const Position& position, double value);
  /// At most 3 points for each of `most_buckets` buckets: its lowest value, its highest value and a gap.
  Json to_json(std::size_t most_buckets);

 private:
  struct Point {
    std::uint64_t index = 0;  ///< the place in the series
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
