// Collects row by row what a page shows of the rows of a run.
#pragma once

#include "buckets.hpp"
#include "curve.hpp"
#include "rows.hpp"

#include <muster/json.hpp>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace muster::tool::report {

/// How many buckets all curves of one run may have together.
struct Budget {
  std::size_t metric_buckets = 6000;  ///< for all of the user's metrics
  std::size_t other_buckets = 1500;   ///< for all of muster's own curves
};

/// A checkpoint that a row names.
struct NamedCheckpoint {
  std::string folder, name = {};
  Position position = {};
  double timestamp = 0;
  double save_s = 0;  ///< save time of the slowest rank, from the next row; NaN if unknown
};

class RunRows {
 public:
  RunRows();
  void add(const Row& row);
  /// Returns "metrics", "own" (muster's curves), "split", "slowest", "late", "worlds" and "left_out".
  Json to_json(const Budget& budget);
  /// The newest checkpoints.
  const std::deque<NamedCheckpoint>& checkpoints() const { return checkpoints_; }
  std::uint64_t checkpoint_count() const { return checkpoint_count_; }

 private:
  /// What ranks spend their time on.
  static constexpr std::array<const char*, 4> activities{"compute", "wait", "data", "save"};
  static constexpr std::array<const char*, 4> statistics{"min", "median", "max", "max_rank"};
  /// Numbers with a fixed meaning; 16 more follow, which are rank_times.ACTIVITY.STATISTIC.
  enum Known : std::size_t { report, step, seconds, timestamp, world_size, first_rank_time };
  static constexpr std::size_t known_count = first_rank_time + activities.size() * statistics.size();

  /// What is done with a number: it is one of those with a fixed meaning, a point of a curve, or ignored.
  struct Column {
    enum class Kind { known, metric, own, ignored } kind = Kind::ignored;
    std::size_t known = 0;
    Curve* curve = nullptr;
  };
  struct NameHash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  struct Span {
    double min = 0, median = 0, max = 0;  ///< the median is a sum over the reports until it is written
    std::int64_t max_rank = -1;
  };
  struct SplitBucket {
    Position position = {};  ///< of the bucket's last report
    std::int64_t reports = 1;
    std::array<Span, activities.size()> spans = {};
    void merge(const SplitBucket& later);
  };
  struct LateRank {
    std::int64_t times = 0;
    Position first = {}, last = {};
    double most_behind = 0;
  };
  struct World {
    double from = 0, to = 0;
    std::int64_t size = 0;
    Position first = {};
  };

  const Column& column_of(std::string_view name);
  Column new_column(std::string_view name);
  double rank_time(std::size_t activity, std::size_t statistic) const;
  void add_split();
  void add_late_ranks(const Row& row);
  void add_checkpoint(const Row& row);
  void add_world();
  Json split_to_json(std::size_t most_buckets);
  Json slowest_to_json() const;
  Json late_to_json() const;

  std::unordered_map<std::string, Column, NameHash, std::equal_to<>> columns_ = {};
  std::map<std::string, Curve> metrics_ = {}, own_ = {};
  std::set<std::string> left_out_ = {};
  std::array<double, known_count> known_ = {};  // of the current row
  Position position_ = {};
  std::vector<std::pair<Curve*, double>> values_ = {};  // of the current row
  Buckets<SplitBucket> split_;
  // How often each rank was the slowest, for each activity.
  std::array<std::map<std::int64_t, std::int64_t>, activities.size()> slowest_ = {};
  std::map<std::tuple<std::int64_t, std::string, std::string>, LateRank> late_ = {};  // by rank, host and cause
  std::deque<NamedCheckpoint> checkpoints_ = {};
  std::uint64_t checkpoint_count_ = 0;
  bool last_row_has_checkpoint_ = false;
  std::vector<World> worlds_ = {};
};

}  // namespace muster::tool::report
