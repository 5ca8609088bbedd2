// Option structs as JSON: how each type of field is written and read. Each room does this for its own structs with
// MUSTER_OPTIONS; a field whose type is an enum needs EnumNames.
#pragma once

#include "muster/error.hpp"
#include "muster/json.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster::detail {

/// An option has an invalid value, or a key is no option. A caller that reads a file turns it into an Error that names
/// the file.
struct InvalidOption : Error {
  InvalidOption(std::string which, std::string what)
      : Error(ExitCode::data, "reading options", (which.empty() ? "the JSON" : which) + " " + what, "Correct it"),
        key(std::move(which)),
        fact(std::move(what)) {}
  std::string key;  ///< the key with its parents: "scaling_config" "num_workers"; empty for the whole JSON
  std::string fact;
};

inline void require_valid(bool holds, const std::string& fact) {
  if (!holds) throw InvalidOption("", fact);
}

/// Calls `read`. If it throws an InvalidOption, adds `key` as a parent to the key in it.
template <class Read>
void with_parent_key(const std::string& key, const Read& read) {
  try {
    read();
  } catch (const InvalidOption& error) {
    throw InvalidOption('"' + key + '"' + (error.key.empty() ? "" : " ") + error.key, error.fact);
  }
}

namespace option_json {

using std::chrono::milliseconds;

// Fields that are not data, such as functions, are left out.
template <class T>
constexpr bool is_data = true;
template <class Result, class... Arguments>
constexpr bool is_data<std::function<Result(Arguments...)>> = false;
template <class T>
constexpr bool is_data<std::shared_ptr<T>> = false;
template <class T>
constexpr bool is_data<std::vector<std::shared_ptr<T>>> = false;

/// Specialised for each enum that is an option: `names`, in the order of the enumerators' values.
template <class Enum>
struct EnumNames;

template <class T>
Json to(const T& value) {
  if constexpr (std::is_enum_v<T>)
    return EnumNames<T>::names.at(static_cast<std::size_t>(value));
  else if constexpr (std::is_same_v<T, std::filesystem::path>)
    return value.string();
  else if constexpr (std::is_same_v<T, milliseconds>)
    return value.count();
  else
    return value;
}
template <class T>
Json to(const std::optional<T>& value) {
  return value ? to(*value) : Json();
}

template <class T>
void from(const Json& json, T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    require_valid(json.is_boolean(), "is neither true nor false");
  } else if constexpr (std::is_integral_v<T>) {
    require_valid(json.is_number_integer(), "is not a whole number");
    require_valid(json.is_number_unsigned() ? std::in_range<T>(json.get<std::uint64_t>())
                                            : std::in_range<T>(json.get<std::int64_t>()),
                  "is out of range");
  } else if constexpr (std::is_floating_point_v<T>) {
    require_valid(json.is_number(), "is not a number");
  } else if constexpr (std::is_same_v<T, std::string>) {
    require_valid(json.is_string(), "is not a text");
  }
  json.get_to(value);
}
template <class T>
requires std::is_enum_v<T>
void from(const Json& json, T& value) {
  std::string all;
  const auto& names = EnumNames<T>::names;
  for (const std::string name : names) all += (all.empty() ? "" : ", ") + name;
  const auto name = std::find(names.begin(), names.end(), json);
  require_valid(name != names.end(), "is none of " + all);
  value = static_cast<T>(name - names.begin());
}
inline void from(const Json& json, std::filesystem::path& path) {
  require_valid(json.is_string(), "is not a path");
  path = json.get<std::string>();
}
inline void from(const Json& json, milliseconds& duration) {
  milliseconds::rep count = 0;
  from(json, count);
  duration = milliseconds(count);
}
inline void from(const Json& json, std::vector<std::string>& names) {
  require_valid(json.is_array() && std::ranges::all_of(json, [](const Json& name) { return name.is_string(); }),
                "is not a list of names");
  json.get_to(names);
}
template <class T>
void from(const Json& json, std::optional<T>& value) {
  if (json.is_null()) return value.reset();
  from(json, value.emplace(T{}));
}

/// Takes the first name off `names` ("a, b, c"). Returns its JSON key: the name, with "_ms" if T is milliseconds.
template <class T>
std::string take_key(std::string_view& names) {
  std::string key(names.substr(0, names.find(',')));
  names.remove_prefix(std::min(names.size(), key.size() + 2));
  return std::is_same_v<T, milliseconds> || std::is_same_v<T, std::optional<milliseconds>> ? key + "_ms" : key;
}

template <class... Fields>
void write(Json& json, std::string_view names, const Fields&... fields) {
  json = Json::object();
  const auto put = [&]<class T>(const T& field) {
    const auto key = take_key<T>(names);
    if constexpr (is_data<T>) json[key] = to(field);
  };
  (put(fields), ...);
}

template <class... Fields>
void read(const Json& json, std::string_view names, Fields&... fields) {
  require_valid(json.is_object(), "is not an object");
  std::vector<std::string> known;
  const auto take = [&]<class T>(T& field) {
    const auto key = take_key<T>(names);
    if constexpr (is_data<T>) {
      known.push_back(key);
      if (const auto found = json.find(key); found != json.end()) with_parent_key(key, [&] { from(*found, field); });
    }
  };
  (take(fields), ...);
  for (const auto& [key, value] : json.items())
    with_parent_key(key,
                    [&, &key = key] { require_valid(std::ranges::find(known, key) != known.end(), "is no option"); });
}

}  // namespace option_json
}  // namespace muster::detail

// Defines to_json and from_json; use it in the namespace of the struct. The list has all fields of the struct in their
// order. A list that lacks a field does not compile, but a wrong order is not noticed.
#define MUSTER_OPTIONS(Type, ...)                                        \
  void to_json(Json& json, const Type& options) {                        \
    const auto& [__VA_ARGS__] = options;                                 \
    muster::detail::option_json::write(json, #__VA_ARGS__, __VA_ARGS__); \
  }                                                                      \
  void from_json(const Json& json, Type& options) {                      \
    auto& [__VA_ARGS__] = options;                                       \
    muster::detail::option_json::read(json, #__VA_ARGS__, __VA_ARGS__);  \
  }
