#include "sweep/space.hpp"

#include "base/hash.hpp"
#include "base/json.hpp"
#include "base/text.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

namespace muster {
namespace detail::sweep {
namespace {

/// Returns a number below `count`; all are nearly equally likely (Lemire, 2019, without his rejection step, which has a
/// probability below count / 2^64).
std::uint64_t below(std::uint64_t count, std::uint64_t random) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(random) * count) >> 64);
}

double between(double low, double high, std::uint64_t random) {
  return low + (high - low) * (static_cast<double>(random >> 11) * 0x1p-53);
}

double log_between(double low, double high, std::uint64_t random) {
  // exp() and log() may round beyond the limits.
  return std::clamp(std::exp(between(std::log(low), std::log(high), random)), low, high);
}

Json drawn(const Domain& domain, std::uint64_t random) {
  const auto& values = domain.values();
  switch (domain.kind()) {
    case Domain::Kind::uniform:
      return between(values[0], values[1], random);
    case Domain::Kind::log_uniform:
      return log_between(values[0], values[1], random);
    case Domain::Kind::randint: {
      const auto low = static_cast<std::uint64_t>(values[0].get<std::int64_t>());
      const auto high = static_cast<std::uint64_t>(values[1].get<std::int64_t>());
      return static_cast<std::int64_t>(low + below(high - low, random));
    }
    default:
      return values[below(values.size(), random)];
  }
}

void set(Config& config, std::string_view name, Json value) {
  auto* place = &config;
  for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.')) {
    place = &(*place)[std::string(name.substr(0, dot))];
    name.remove_prefix(dot + 1);
  }
  (*place)[std::string(name)] = std::move(value);
}

void check_names(const Space& space) {
  const auto refuse = [](const std::string& name, const char* fact) {
    throw Error(ExitCode::usage, "reading the space of a sweep", "the setting \"" + name + "\" " + fact,
                "Give each setting its name once, as in {\"optimizer.lr\", muster::uniform(0, 1)}");
  };
  std::set<std::string> all;
  for (const auto& [name, domain] : space) {
    if (name.empty() || name.front() == '.' || name.back() == '.' || name.find("..") != name.npos)
      refuse(name, "has no name of its own");
    if (!all.insert(name).second) refuse(name, "is there twice");
  }
  for (const auto& name : all)
    for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1))
      if (all.contains(name.substr(0, dot))) refuse(name, "is inside another setting of the space");
}

/// A limit against mistakes: each trial has a folder.
constexpr int most_trials = 1'000'000;

void check_size(const Space& space, int num_samples) {
  double trials = num_samples;  // a double, which does not overflow
  for (const auto& [name, domain] : space)
    if (domain.kind() == Domain::Kind::grid) trials *= static_cast<double>(domain.values().size());
  if (trials > most_trials)
    throw Error(ExitCode::usage, "reading the space of a sweep",
                str("its grids and num_samples make more than ", most_trials, " trials"),
                "Draw some settings by muster::choice() instead of muster::grid(), or lower num_samples");
}

/// True if trial.json can restore the value: infinity would become null, and text that is not UTF-8 would be changed.
bool is_kept_by_json(const Json& value) { return detail::json_from_text(json_text_lossy(value)) == value; }

}  // namespace

std::vector<TrialSettings> sample_space(const Space& space, int num_samples, std::uint64_t seed) {
  check_names(space);
  check_size(space, num_samples);
  std::uint64_t combinations = 1;
  for (const auto& [name, domain] : space)
    if (domain.kind() == Domain::Kind::grid) combinations *= domain.values().size();
  std::vector<TrialSettings> points;
  for (int sample = 0; sample < num_samples; ++sample)
    for (std::uint64_t combination = 0; combination < combinations; ++combination) {
      TrialSettings point{.sample = sample};
      auto left = combination, of_grids = combinations;
      for (const auto& [name, domain] : space) {
        if (domain.kind() == Domain::Kind::grid) {
          of_grids /= domain.values().size();
          set(point.config, name, domain.values()[left / of_grids]);
          left %= of_grids;
        } else {
          set(point.config, name,
              drawn(domain, scrambled(scrambled(scrambled(seed) + points.size()) ^ hash_of_text(name))));
        }
      }
      points.push_back(std::move(point));
    }
  return points;
}

}  // namespace detail::sweep

Domain::Domain(Kind kind, std::vector<Json> values) : kind_(kind), values_(std::move(values)) {
  const auto require = [](bool holds, const char* what, const std::string& fact) {
    if (!holds) throw Error(ExitCode::usage, detail::str("choosing from ", what), fact, "Correct the sweep's space");
  };
  if (kind == Kind::grid || kind == Kind::choice) {
    const char* const what = kind == Kind::grid ? "a grid" : "a choice";
    require(!values_.empty(), what, "it has no values");
    for (const auto& value : values_)
      require(detail::sweep::is_kept_by_json(value), what,
              "it has a value that JSON cannot hold: NaN, infinity or a text that is not UTF-8");
    return;
  }
  const char* const what = kind == Kind::uniform ? "uniform" : kind == Kind::log_uniform ? "log_uniform" : "randint";
  const bool numbers = values_.size() == 2 && values_[0].is_number() && values_[1].is_number() &&
                       (kind != Kind::randint || (values_[0].is_number_integer() && values_[1].is_number_integer()));
  require(numbers, what, "its bounds are not two numbers");
  const auto low = values_[0].get<double>(), high = values_[1].get<double>();
  require(std::isfinite(low) && std::isfinite(high) && values_[0] < values_[1], what,
          "its lower bound " + detail::json_text(values_[0]) + " is not below " + detail::json_text(values_[1]));
  require(kind != Kind::uniform || std::isfinite(high - low), what,
          "the range from " + detail::json_text(values_[0]) + " to " + detail::json_text(values_[1]) +
              " is wider than a double can be");
  require(kind != Kind::log_uniform || low > 0, what,
          "its lower bound " + detail::json_text(values_[0]) + " is not above 0");
}

Domain grid(std::vector<Json> values) { return {Domain::Kind::grid, std::move(values)}; }
Domain choice(std::vector<Json> values) { return {Domain::Kind::choice, std::move(values)}; }
Domain uniform(double low, double high) { return {Domain::Kind::uniform, {low, high}}; }
Domain log_uniform(double low, double high) { return {Domain::Kind::log_uniform, {low, high}}; }
Domain randint(std::int64_t low, std::int64_t high) { return {Domain::Kind::randint, {low, high}}; }

}  // namespace muster
