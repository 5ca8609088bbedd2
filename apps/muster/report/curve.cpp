#include "curve.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace muster::tool::report {

void PositionColumns::add(const Position& position) {
  const auto ms = std::abs(position.seconds) < 1e12 ? std::llround(position.seconds * 1000) : 0;
  reports_.push_back(position.report - std::exchange(report_, position.report));
  steps_.push_back(position.step - std::exchange(step_, position.step));
  milliseconds_.push_back(ms - std::exchange(ms_, ms));
}

void PositionColumns::move_to(Json& object) {
  object["report"] = std::move(reports_);
  object["step"] = std::move(steps_);
  object["ms"] = std::move(milliseconds_);
}

void Curve::Bucket::merge(const Bucket& later) {
  if (later.lowest && (!lowest || later.lowest->value < lowest->value)) lowest = later.lowest;
  if (later.highest && (!highest || later.highest->value > highest->value)) highest = later.highest;
  if (!gap) gap = later.gap;
}

void Curve::add(const Position& position, double value) {
  const Point point{count_++, position, value};
  if (std::isfinite(value)) {
    buckets_.add({.lowest = point, .highest = point});
  } else {
    ++gap_count_;
    buckets_.add({.gap = point});
  }
  if (!first_) first_ = point;
  last_ = point;
}

std::vector<Curve::Point> Curve::points() const {
  std::vector<Point> points;
  const auto add = [&](const std::optional<Point>& point) {
    if (point) points.push_back(*point);
  };
  add(first_);
  for (const auto& bucket : buckets_.all()) {
    add(bucket.lowest);
    add(bucket.highest);
    add(bucket.gap);
  }
  add(last_);
  std::ranges::sort(points, {}, &Point::index);
  const auto repeated = std::ranges::unique(points, {}, &Point::index);
  points.erase(repeated.begin(), repeated.end());
  return points;
}

Json Curve::to_json(std::size_t most_buckets) {
  buckets_.reduce_to(most_buckets);
  Bucket whole;
  for (const auto& bucket : buckets_.all()) whole.merge(bucket);
  const auto value_of = [](const std::optional<Point>& point) { return point ? Json(point->value) : Json(); };
  const auto shown = points();
  Json curve{{"count", count_},
             {"gaps", gap_count_},
             {"whole", shown.size() == count_},
             {"min", value_of(whole.lowest)},
             {"max", value_of(whole.highest)},
             {"last", value_of(last_)}};
  PositionColumns positions;
  Json values = Json::array();
  for (const auto& point : shown) {
    positions.add(point.position);
    values.push_back(point.value);  // JSON has null for NaN
  }
  positions.move_to(curve);
  curve["value"] = std::move(values);
  return curve;
}

}  // namespace muster::tool::report
