#include "run_rows.hpp"

#include "base/text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace muster::tool::report {
namespace {

constexpr std::size_t most_curves = 500, most_buckets = 1000, most_checkpoints = 1000, most_late = 1000,
                      most_worlds = 1000, most_left_out = 50, most_slowest = 5, most_own = 100;
constexpr double not_known = std::numeric_limits<double>::quiet_NaN();

std::int64_t whole(double value) { return std::abs(value) < 9e15 ? std::llround(value) : 0; }

/// Rounds to six digits, which are enough for a time.
double rounded(double value) { return std::strtod(detail::formatted("%.6g", value).c_str(), nullptr); }

std::size_t share(std::size_t buckets, std::size_t curves) {
  return std::clamp<std::size_t>(buckets / std::max<std::size_t>(curves, 1), 20, most_buckets);
}

}  // namespace

void RunRows::SplitBucket::merge(const SplitBucket& later) {
  position = later.position;
  reports += later.reports;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    auto& span = spans[i];
    const auto& other = later.spans[i];
    span.median += other.median;
    span.min = std::min(span.min, other.min);
    if (other.max > span.max) span.max = other.max, span.max_rank = other.max_rank;
  }
}

RunRows::RunRows() : split_(most_buckets) {
  using Kind = Column::Kind;
  for (const char* name : {"epoch", "num_samples", "memory_bytes.max_rank"}) columns_.emplace(name, Column());
  const std::pair<const char*, Known> known[] = {{"training_iteration", report},
                                                 {"global_step", step},
                                                 {"time_total_s", seconds},
                                                 {"timestamp", timestamp},
                                                 {"world_size", world_size}};
  for (const auto& [name, number] : known) columns_.emplace(name, Column{.kind = Kind::known, .known = number});
  std::size_t number = first_rank_time;
  for (const std::string activity : activities)
    for (const char* statistic : statistics)
      columns_.emplace("rank_times." + activity + "." + statistic, Column{.kind = Kind::known, .known = number++});
  for (const char* name : {"samples_per_s", "time_this_iter_s", "memory_bytes.max"})
    columns_.emplace(name, Column{.kind = Kind::own});
}

RunRows::Column RunRows::new_column(std::string_view name) {
  if (name.starts_with("late_ranks[") || name.starts_with("rank_times.")) return {};
  if (name.starts_with("live.")) return {.kind = own_.size() < most_own ? Column::Kind::own : Column::Kind::ignored};
  if (metrics_.size() == most_curves) {
    if (left_out_.size() < most_left_out) left_out_.emplace(name);
    return {};
  }
  return {.kind = Column::Kind::metric};
}

const RunRows::Column& RunRows::column_of(std::string_view name) {
  auto found = columns_.find(name);
  if (found == columns_.end()) {
    // Names without a curve are not stored, since there may be any number of them.
    static const Column none;
    const auto column = new_column(name);
    if (column.kind == Column::Kind::ignored) return none;
    found = columns_.emplace(std::string(name), column).first;
  }
  auto& column = found->second;
  if (column.curve == nullptr && (column.kind == Column::Kind::metric || column.kind == Column::Kind::own)) {
    auto& curves = column.kind == Column::Kind::metric ? metrics_ : own_;
    column.curve = &curves.emplace(std::string(name), Curve(2 * most_buckets)).first->second;
  }
  return column;
}

void RunRows::add(const Row& row) {
  known_.fill(not_known);
  values_.clear();
  for (const auto& number : row.numbers) {
    const auto& column = column_of(number.name);
    if (column.kind == Column::Kind::known) known_[column.known] = number.value;
    if (column.curve != nullptr) values_.emplace_back(column.curve, number.value);
  }
  position_ = {.report = std::isnan(known_[report]) ? position_.report + 1 : whole(known_[report]),
               .step = whole(known_[step]),
               .seconds = std::isfinite(known_[seconds]) ? known_[seconds] : 0};
  for (const auto& [curve, value] : values_) curve->add(position_, value);
  for (const auto name : row.left_out)
    if (left_out_.size() < most_left_out) left_out_.emplace(name);
  add_split();
  add_late_ranks(row);
  add_checkpoint(row);
  add_world();
}

double RunRows::rank_time(std::size_t activity, std::size_t statistic) const {
  return known_[first_rank_time + activity * statistics.size() + statistic];
}

void RunRows::add_split() {
  SplitBucket bucket{.position = position_};
  bool has_times = false;
  for (std::size_t i = 0; i < activities.size(); ++i) {
    const double median = rank_time(i, 1);
    if (!std::isfinite(median)) continue;
    has_times = true;
    const double least = rank_time(i, 0), most = rank_time(i, 2), rank = rank_time(i, 3);
    bucket.spans[i] = {.min = std::isfinite(least) ? least : median,
                       .median = median,
                       .max = std::isfinite(most) ? most : median,
                       .max_rank = std::isfinite(rank) ? whole(rank) : -1};
    if (bucket.spans[i].max_rank >= 0 && bucket.spans[i].max > 0) ++slowest_[i][bucket.spans[i].max_rank];
  }
  if (has_times) split_.add(bucket);
}

void RunRows::add_late_ranks(const Row& row) {
  for (std::size_t i = 0;; ++i) {
    const auto prefix = detail::str("late_ranks[", i, "].");
    const double rank = row.number(prefix + "rank");
    if (std::isnan(rank)) return;
    const std::tuple key(whole(rank), std::string(row.text(prefix + "host")), std::string(row.text(prefix + "cause")));
    if (late_.size() == most_late && !late_.contains(key)) continue;
    auto& late = late_[key];
    if (late.times++ == 0) late.first = position_;
    late.last = position_;
    if (const double behind = row.number(prefix + "behind"); behind > late.most_behind) late.most_behind = behind;
  }
}

void RunRows::add_checkpoint(const Row& row) {
  // A row is written before its checkpoint is saved, so the next row has the time of that save.
  if (last_row_has_checkpoint_) checkpoints_.back().save_s = rank_time(3, 2);
  const auto folder = row.text("checkpoint_dir_name");
  last_row_has_checkpoint_ = !folder.empty();
  if (folder.empty()) return;
  ++checkpoint_count_;
  checkpoints_.push_back({.folder = std::string(folder),
                          .name = std::string(row.text("checkpoint_name")),
                          .position = position_,
                          .timestamp = known_[timestamp],
                          .save_s = not_known});
  if (checkpoints_.size() > most_checkpoints) checkpoints_.pop_front();
}

void RunRows::add_world() {
  if (!std::isfinite(known_[world_size])) return;
  const auto size = whole(known_[world_size]);
  if (worlds_.empty() || worlds_.back().size != size) {
    if (worlds_.size() == most_worlds) return;
    worlds_.push_back({.from = known_[timestamp], .size = size, .first = position_});
  }
  worlds_.back().to = known_[timestamp];
}

Json RunRows::split_to_json(std::size_t buckets) {
  split_.reduce_to(buckets);
  if (split_.all().empty()) return {};
  Json split;
  PositionColumns positions;
  for (const auto& bucket : split_.all()) positions.add(bucket.position);
  positions.move_to(split);
  for (std::size_t i = 0; i < activities.size(); ++i) {
    Json least = Json::array(), median = Json::array(), most = Json::array(), rank = Json::array();
    double total = 0;
    for (const auto& bucket : split_.all()) {
      const auto& span = bucket.spans[i];
      least.push_back(rounded(span.min));
      median.push_back(rounded(span.median / static_cast<double>(bucket.reports)));
      most.push_back(rounded(span.max));
      rank.push_back(span.max_rank);
      total += span.median;
    }
    split[activities[i]] = {
        {"min", least}, {"median", median}, {"max", most}, {"max_rank", rank}, {"total", rounded(total)}};
  }
  return split;
}

Json RunRows::slowest_to_json() const {
  Json all = Json::object();
  for (std::size_t i = 0; i < activities.size(); ++i) {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranks(slowest_[i].begin(), slowest_[i].end());
    std::ranges::stable_sort(ranks, std::greater(), &std::pair<std::int64_t, std::int64_t>::second);
    ranks.resize(std::min(ranks.size(), most_slowest));
    if (!ranks.empty()) all[activities[i]] = ranks;
  }
  return all;
}

Json RunRows::late_to_json() const {
  Json all = Json::array();
  for (const auto& [key, late] : late_)
    all.push_back({{"rank", std::get<0>(key)},
                   {"host", std::get<1>(key)},
                   {"cause", std::get<2>(key)},
                   {"times", late.times},
                   {"first_report", late.first.report},
                   {"last_report", late.last.report},
                   {"behind", late.most_behind}});
  return all;
}

Json RunRows::to_json(const Budget& budget) {
  Json metrics = Json::object(), own = Json::object(), worlds = Json::array();
  for (auto& [name, curve] : metrics_) metrics[name] = curve.to_json(share(budget.metric_buckets, metrics_.size()));
  const auto own_share = share(budget.other_buckets, own_.size() + (split_.all().empty() ? 0 : activities.size()));
  for (auto& [name, curve] : own_) own[name] = curve.to_json(own_share);
  for (const auto& world : worlds_)
    worlds.push_back({{"from", world.from},
                      {"to", world.to},
                      {"world_size", world.size},
                      {"report", world.first.report},
                      {"step", world.first.step}});
  return {{"metrics", metrics},
          {"own", own},
          {"split", split_to_json(own_share)},
          {"slowest", slowest_to_json()},
          {"late", late_to_json()},
          {"worlds", worlds},
          {"left_out", left_out_}};
}

}  // namespace muster::tool::report
