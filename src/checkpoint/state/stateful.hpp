// What a StateEntry refers to: an object that can be saved, compared with what was saved, and loaded; and single values
// of a state as JSON.
#pragma once

#include "checkpoint/files/pieces.hpp"
#include "muster/state.hpp"

#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <cmath>
#include <concepts>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace muster::detail::checkpoint {

/// Where in the state each parameter stands: what optimizers name their own state after.
using ParameterPaths = std::map<const c10::TensorImpl*, std::string>;

/// Whether every rank holds the same of an entry.
enum class Replication {
  equal,     ///< tensors and values of the user: the same on every rank, or nothing is saved
  averaged,  ///< kept alike by averaging, but for drift: rank 0's is saved
  per_rank,  ///< each rank has its own: saved as [world, …], values as a list
};

/// Something that keeps a saved state from being loaded.
struct Difference {
  std::string path;  ///< relative to the entry
  std::string text;
};
using Differences = std::vector<Difference>;

/// Notes a shape or a type that is not the one here.
void compare_tensor(const std::string& path, const at::Tensor& saved, at::IntArrayRef shape, at::ScalarType type,
                    Differences& differences);

/// An object with a state. Paths are relative to the entry: a single tensor has "", a single value is all of the JSON.
struct Stateful {
  virtual ~Stateful() = default;
  virtual StateDict save(const ParameterPaths& parameters) const = 0;
  /// Changes nothing.
  virtual void compare(const StateDict& saved, const ParameterPaths& parameters, Differences& differences) const = 0;
  /// Only after compare() has found no difference.
  virtual void load(const StateDict& saved, const ParameterPaths& parameters) = 0;

  /// The tensors that an optimizer may own the state of, by path.
  virtual std::map<std::string, at::Tensor> parameters() const { return {}; }
  virtual Replication replication() const { return Replication::equal; }
  /// For Replication::per_rank: what rank `here` takes of what another number of ranks had, if there is such a thing.
  virtual std::optional<StateDict> regroup(const StateDict&, Rank) const { return {}; }

  /// Whether load() is the user's own code, which may refuse what compare() cannot see.
  virtual bool may_refuse() const { return false; }
};

inline Replication replication_of(const StateEntry& entry) {
  return entry.is_per_rank() ? Replication::per_rank : entry.object()->replication();
}

/// A number, a bool, a string, JSON; two numbers; one of these that may be missing. What JSON does not know are the
/// strings "inf", "-inf", "nan".
template <class T>
Json value_to_json(const T& value) {
  if constexpr (std::floating_point<T>)
    return std::isfinite(value) ? Json(value) : Json(std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
  else if constexpr (std::same_as<T, std::tuple<double, double>>)
    return Json::array({value_to_json(std::get<0>(value)), value_to_json(std::get<1>(value))});
  else if constexpr (requires { value.has_value(); })
    return value ? value_to_json(*value) : Json();
  else
    return value;
}

/// False if it is something else.
template <class T>
bool value_from_json(const Json& json, T& value) {
  if constexpr (std::floating_point<T>) {
    using Limits = std::numeric_limits<T>;
    if (!json.is_number() && json != "nan" && json != "inf" && json != "-inf") return false;
    value = json.is_number() ? json.get<T>() : json == "nan" ? Limits::quiet_NaN() : Limits::infinity();
    if (json == "-inf") value = -value;
    return true;
  } else if constexpr (std::same_as<T, std::tuple<double, double>>) {
    return json.is_array() && json.size() == 2 && value_from_json(json[0], std::get<0>(value)) &&
           value_from_json(json[1], std::get<1>(value));
  } else if constexpr (requires { value.has_value(); }) {
    value.reset();
    return json.is_null() || value_from_json(json, value.emplace());
  } else {
    const bool fits = std::same_as<T, bool> ? json.is_boolean()
                      : std::integral<T>    ? json.is_number_integer()
                                            : !std::same_as<T, std::string> || json.is_string();
    if (fits) value = json.get<T>();
    return fits;
  }
}

}  // namespace muster::detail::checkpoint
