#include "launch/settings.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

namespace muster::detail::launch {
namespace {

void collect_keys(const Json& value, const std::string& prefix, std::vector<std::string>& keys) {
  for (const auto& [key, child] : value.items()) {
    keys.push_back(prefix + key);
    if (child.is_object()) collect_keys(child, prefix + key + ".", keys);
  }
}

/// The candidate with the fewest edits (Levenshtein); empty if there are none.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t fewest = static_cast<std::size_t>(-1);
  for (const auto& candidate : candidates) {
    std::vector<std::size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (std::size_t i = 1; i <= word.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i);
      for (std::size_t j = 1; j <= candidate.size(); ++j) {
        const auto replaced = diagonal + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    if (row.back() < fewest) {
      fewest = row.back();
      best = candidate;
    }
  }
  return best;
}

[[noreturn]] void unknown_key(ExitCode code, const std::string& doing, const std::string& key, const Json& defaults) {
  std::vector<std::string> keys;
  collect_keys(defaults, "", keys);
  const auto close = nearest(key, keys);
  throw Error(code, doing, "the program has no setting \"" + key + "\"",
              close.empty() ? "It has no settings at all" : "Did you mean \"" + close + "\"?");
}

const char* kind(const Json& value) {
  if (value.is_number()) return "a number";
  if (value.is_string()) return "text";
  if (value.is_boolean()) return "true or false";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return "null";
}

/// Whether `value` may stand where `was` stood; null fits everything and everything fits null.
bool fits(const Json& was, const Json& value) {
  if (was.is_null() || value.is_null()) return true;
  if (was.is_number_integer() && value.is_number_float())
    return value.get<double>() == static_cast<double>(value.get<std::int64_t>());
  return std::string_view(kind(was)) == kind(value);
}

void lay_over(Json& target, const Json& value, ExitCode code, const std::string& doing, const std::string& key,
              const Json& defaults) {
  if (target.is_object() && value.is_object() && !(target.empty() && !key.empty())) {
    for (const auto& [name, child] : value.items()) {
      const auto path = key.empty() ? name : key + "." + name;
      if (!target.contains(name)) unknown_key(code, doing, path, defaults);
      lay_over(target[name], child, code, doing, path, defaults);
    }
    return;
  }
  if (target.is_number_integer() && value.is_number_float() && !fits(target, value))
    throw Error(code, doing, "\"" + key + "\" is a whole number, not " + value.dump(),
                "Give it a whole number, or the program a default such as " + target.dump() + ".0");
  if (!fits(target, value))
    throw Error(code, doing, "\"" + key + "\" is " + kind(target) + ", not " + kind(value) + " (" + value.dump() + ")",
                "Give it " + std::string(kind(target)));
  if (target.is_number_integer() && value.is_number_float())
    target = value.get<std::int64_t>();
  else if (target.is_number_float() && value.is_number())
    target = value.get<double>();
  else
    target = value;
}

Json parse_value(const std::string& text, const Json& was) {
  if (was.is_string()) return text;
  try {
    return parse_json(text, "reading a value");
  } catch (const Error&) {
    return text;
  }
}

void apply_setting(Json& config, const std::string& setting, const Json& defaults) {
  const std::string doing = "reading --set " + setting;
  const auto equals = setting.find('=');
  if (equals == std::string::npos || equals == 0)
    throw Error(ExitCode::usage, doing, "it is not of the form key=VALUE", "Write it as in --set lr=0.01");
  const auto key = setting.substr(0, equals);
  Json* target = &config;
  for (std::size_t from = 0; from <= key.size();) {
    const auto dot = std::min(key.find('.', from), key.size());
    const auto name = key.substr(from, dot - from);
    if (!target->is_object() || !target->contains(name)) unknown_key(ExitCode::usage, doing, key, defaults);
    target = &(*target)[name];
    from = dot + 1;
  }
  lay_over(*target, parse_value(setting.substr(equals + 1), *target), ExitCode::usage, doing, key, defaults);
}

/// The first setting that JSON does not keep, nor params.json with it; empty if there is none.
std::string lost_in_json(const Json& value, const std::string& key) {
  if (!value.is_object()) {
    const auto kept = Json::parse(value.dump(-1, ' ', false, Json::error_handler_t::replace));
    return kept == value ? "" : key;
  }
  for (const auto& [name, child] : value.items())
    if (auto lost = lost_in_json(child, key.empty() ? name : key + "." + name); !lost.empty()) return lost;
  return {};
}

}  // namespace

Config resolve(Config defaults, const std::optional<std::filesystem::path>& file, const std::vector<std::string>& set) {
  Json config = defaults;
  if (file) {
    const std::string doing = "reading the configuration " + file->string();
    const auto content = read_json(*file, doing, /*comments=*/true);
    if (!content.is_object())
      throw Error(ExitCode::data, doing, "it is not a JSON object", "Write {\"key\": value, …}");
    lay_over(config, content, ExitCode::data, doing, "", defaults);
  }
  for (const auto& setting : set) apply_setting(config, setting, defaults);
  if (const auto key = lost_in_json(config, ""); !key.empty())
    throw Error(ExitCode::usage, "reading the settings", "\"" + key + "\" is NaN, infinite, or no text",
                "Give it a value that JSON knows; null may stand for none");
  return config;
}

Config overlaid(Config defaults, const Config& values, const std::string& doing) {
  if (defaults.empty()) return values;
  Json config = defaults;
  lay_over(config, values, ExitCode::usage, doing, "", defaults);
  return config;
}

std::chrono::seconds parse_duration(std::string_view text) {
  constexpr std::uint64_t most = 1'000'000'000;  // seconds that can be added to any time: 30 years
  std::uint64_t clock = 0, others = 0;
  const char *at = text.data(), *const end = at + text.size();
  std::string_view units = "-:hms";  // that may come next
  do {
    std::uint64_t value = 0;
    const auto [stop, error] = std::from_chars(at, end, value);
    const char unit = stop == end ? 's' : *stop;
    if (unit == ':')
      clock = (clock + value) * 60;
    else
      others += value * (unit == '-' ? 86400 : unit == 'h' ? 3600 : unit == 'm' ? 60 : 1);
    if (error != std::errc() || (stop != end && units.find(unit) == units.npos) || value > most ||
        clock + others > most)
      throw Error(ExitCode::usage, "reading a duration", "\"" + std::string(text) + "\" is not one",
                  "Write it as 90, 45s, 30m, 1h30m, HH:MM:SS or D-HH:MM:SS");
    units = unit == '-' || unit == ':' ? ":" : "hms";
    at = stop == end ? end : stop + 1;
  } while (at != end || units == ":");
  return std::chrono::seconds(clock + others);
}

}  // namespace muster::detail::launch
