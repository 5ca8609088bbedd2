#include "launch/settings.hpp"

#include "base/json.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>

namespace muster::detail::launch {
namespace {

void collect_keys(const Json& value, const std::string& prefix, std::vector<std::string>& keys) {
  for (const auto& [key, child] : value.items()) {
    keys.push_back(prefix + key);
    if (child.is_object()) collect_keys(child, prefix + key + ".", keys);
  }
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

[[noreturn]] void refuse_duration(std::string_view whole) {
  throw Error(ExitCode::usage, "reading a duration", "\"" + std::string(whole) + "\" is not one",
              "Write it as 90, 45s, 30m, 1h30m, HH:MM:SS or D-HH:MM:SS");
}

/// Seconds that can be added to any time: 30 years.
constexpr std::int64_t most_seconds = 1'000'000'000;

std::int64_t parse_number(std::string_view text, std::string_view whole) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > most_seconds)
    refuse_duration(whole);
  return value;
}

std::chrono::seconds bounded(std::int64_t seconds, std::string_view whole) {
  if (seconds > most_seconds) refuse_duration(whole);
  return std::chrono::seconds(seconds);
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
  return config;
}

std::chrono::seconds parse_duration(std::string_view text) {
  std::int64_t seconds = 0;
  if (text.find(':') != std::string_view::npos || text.find('-') != std::string_view::npos) {
    auto rest = text;
    std::int64_t days = 0;
    if (const auto dash = rest.find('-'); dash != std::string_view::npos) {
      days = parse_number(rest.substr(0, dash), text);
      rest.remove_prefix(dash + 1);
    }
    for (bool more = true; more;) {
      const auto colon = rest.find(':');
      seconds = bounded(seconds * 60 + parse_number(rest.substr(0, colon), text), text).count();
      more = colon != std::string_view::npos;
      if (more) rest.remove_prefix(colon + 1);
    }
    return bounded(seconds + days * 86400, text);
  }
  auto rest = text;
  while (!rest.empty()) {
    const auto unit = rest.find_first_not_of("0123456789");
    const auto value = parse_number(rest.substr(0, unit), text);
    if (unit == std::string_view::npos) return bounded(seconds + value, text);
    const char letter = rest[unit];
    seconds += value * (letter == 'h' ? 3600 : letter == 'm' ? 60 : letter == 's' ? 1 : parse_number("?", text));
    static_cast<void>(bounded(seconds, text));
    rest.remove_prefix(unit + 1);
  }
  return text.empty() ? std::chrono::seconds(parse_number(text, text)) : std::chrono::seconds(seconds);
}

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

}  // namespace muster::detail::launch
