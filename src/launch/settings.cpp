#include "launch/settings.hpp"

#include "base/duration.hpp"
#include "base/json.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace muster::detail::launch {
namespace {

void collect_keys(const Json& value, const std::string& prefix, std::vector<std::string>& keys) {
  for (const auto& [key, child] : value.items()) {
    keys.push_back(prefix + key);
    if (child.is_object()) collect_keys(child, prefix + key + ".", keys);
  }
}

/// The number of edits: characters added, removed, replaced, or swapped with the next.
std::size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i)
    for (std::size_t j = 0; j <= b.size(); ++j) {
      auto& fewest = edits[i][j];
      fewest = std::max(i, j);
      if (i == 0 || j == 0) continue;
      fewest =
          std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        fewest = std::min(fewest, edits[i - 2][j - 2] + 1);
    }
  return edits[a.size()][b.size()];
}

[[noreturn]] void unknown_key(ExitCode code, const std::string& doing, const std::string& key, const Json& defaults) {
  std::vector<std::string> keys;
  collect_keys(defaults, "", keys);
  const auto close = nearest_match(key, keys);
  throw Error(code, doing, "the program has no setting \"" + key + "\"",
              keys.empty()    ? "It has no settings at all"
              : close.empty() ? "It has " + listed(keys, 30, [](const auto& name) { return name; })
                              : "Did you mean \"" + close + "\"?");
}

const char* kind(const Json& value) {
  if (value.is_number()) return "a number";
  if (value.is_string()) return "text";
  if (value.is_boolean()) return "true or false";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return "null";
}

/// The value as text for a message; bytes that are not UTF-8 are replaced.
std::string shown(const Json& value) { return json_text_lossy(value); }

/// True if `value` may replace the default `was`: any value may replace null, a whole number of 64 bits an integer, and
/// a value of the same kind any other default.
bool fits(const Json& was, const Json& value) {
  constexpr double beyond = 9223372036854775808.0;  // 2^63
  if (was.is_null()) return true;
  if (was.is_number_integer() && value.is_number())
    return value.is_number_float()
               ? std::abs(value.get<double>()) < beyond && std::trunc(value.get<double>()) == value.get<double>()
           : value.is_number_unsigned() ? std::in_range<std::int64_t>(value.get<std::uint64_t>())
                                        : true;
  return std::string_view(kind(was)) == kind(value);
}

/// True if the path "a.b" leads to a setting.
bool has_path(const Json& settings, std::string_view path) {
  const auto dot = path.find('.');
  const std::string name(path.substr(0, dot));
  if (!settings.is_object() || !settings.contains(name)) return false;
  return dot == path.npos || has_path(settings.at(name), path.substr(dot + 1));
}

/// {"a": {"b": value}} for the path "a.b".
Json nested(std::string_view path, const Json& value) {
  const auto dot = path.find('.');
  return Json::object(
      {{std::string(path.substr(0, dot)), dot == path.npos ? value : nested(path.substr(dot + 1), value)}});
}

/// The number in a text that JSON does not take for a number: 0.5 for ".5"; null if the text is no number.
Json number_in(const std::string& text) {
  const auto number = parse_number<double>(text);
  return number && std::isfinite(*number) ? Json(*number) : Json();
}

void override_value(Json& target, const Json& value, ExitCode code, const std::string& doing, const std::string& key,
                    const Json& defaults) {
  if (target.is_object() && value.is_object() && !(target.empty() && !key.empty())) {
    for (const auto& [name, child] : value.items()) {
      const auto path = key.empty() ? name : key + "." + name;
      if (!target.contains(name) && has_path(target, name))
        throw Error(code, doing, "the name \"" + name + "\" has a dot, as only --set writes it",
                    "Write it as " + shown(nested(name, child)));
      if (!target.contains(name)) unknown_key(code, doing, path, defaults);
      override_value(target[name], child, code, doing, path, defaults);
    }
    return;
  }
  if (target.is_number_integer() && value.is_number() && !fits(target, value))
    throw Error(code, doing, "\"" + key + "\" is a whole number of 64 bits, not " + shown(value),
                "Give it a whole number, or the program a default such as " + json_text(target) + ".0");
  const auto written = target.is_number() && value.is_string() ? number_in(value.get<std::string>()) : Json();
  if (!fits(target, value))
    throw Error(code, doing, "\"" + key + "\" is " + kind(target) + ", not " + kind(value) + " (" + shown(value) + ")",
                str("Give it ", kind(target), written.is_null() ? "" : ", as in " + json_text(written)));
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
  override_value(*target, parse_value(setting.substr(equals + 1), *target), ExitCode::usage, doing, key, defaults);
}

/// The name of the first setting that JSON, and so params.json, would not keep unchanged; empty if there is none.
std::string lost_in_json(const Json& value, const std::string& key) {
  if (!value.is_object()) {
    const auto kept = json_from_text(json_text_lossy(value));
    return kept == value ? "" : key;
  }
  for (const auto& [name, child] : value.items())
    if (auto lost = lost_in_json(child, key.empty() ? name : key + "." + name); !lost.empty()) return lost;
  return {};
}

}  // namespace

Json read_config(const std::filesystem::path& file) {
  const std::string doing = "reading the configuration " + file.string();
  auto config = read_json(file, doing, /*comments=*/true);
  if (!config.is_object()) throw Error(ExitCode::data, doing, "it is not a JSON object", "Write {\"key\": value, …}");
  return config;
}

Config resolve(Config defaults, const std::vector<std::filesystem::path>& files, const std::vector<std::string>& set) {
  Json config = defaults;
  for (const auto& file : files)
    override_value(config, read_config(file), ExitCode::data, "reading the configuration " + file.string(), "",
                   defaults);
  for (const auto& setting : set) apply_setting(config, setting, defaults);
  if (const auto key = lost_in_json(config, ""); !key.empty())
    throw Error(ExitCode::usage, "reading the settings", "\"" + key + "\" is NaN, infinite or a text that is not UTF-8",
                "Give it a value that JSON knows; null may stand for none");
  return config;
}

Config override_defaults(Config defaults, const Config& values, const std::string& doing) {
  if (defaults.empty()) return values;
  Json config = defaults;
  override_value(config, values, ExitCode::usage, doing, "", defaults);
  return config;
}

std::string nearest_match(std::string_view word, const std::vector<std::string>& candidates) {
  const auto most = std::max<std::size_t>(1, word.size() / 3);
  std::string best;
  std::size_t fewest = most + 1;
  for (const auto& candidate : candidates)
    if (const auto edits = edits_between(word, candidate); edits < fewest) {
      fewest = edits;
      best = candidate;
    }
  return best;
}

std::chrono::seconds parse_duration(std::string_view text) {
  if (const auto clock = parse_clock(text, std::chrono::seconds(1))) return *clock;
  constexpr std::int64_t units[] = {3600, 60, 1};
  std::chrono::seconds total{0};
  std::string_view rest = text, names = "hms";
  do {
    const auto digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
    const auto number = parse_number<std::uint32_t>(rest.substr(0, digits));
    const auto unit = digits == rest.size() ? names.npos : names.find(rest[digits]);
    if (number && unit != names.npos) total += std::chrono::seconds(*number * units[3 - names.size() + unit]);
    if (!number || unit == names.npos || total > longest_time)
      throw Error(ExitCode::usage, "reading a duration", str("\"", text, "\" is not a duration"),
                  "Write it as 90, 45s, 30m, 1h30m, HH:MM:SS or D-HH:MM:SS");
    names.remove_prefix(unit + 1);
    rest.remove_prefix(digits + 1);
  } while (!rest.empty());
  return total;
}

}  // namespace muster::detail::launch
