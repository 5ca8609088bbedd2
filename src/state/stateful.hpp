// Stateful, the interface behind a StateEntry: an object that can be saved, compared with a saved state, and loaded.
// Also the conversion of single values to JSON and back.
#pragma once

#include "muster/state.hpp"
#include "state/rank_in_group.hpp"

#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <cmath>
#include <concepts>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace muster::detail::state {

/// The path of each parameter in the state. Optimizers use these paths as names in their own state.
using ParameterPaths = std::map<const c10::TensorImpl*, std::string>;

/// How the ranks' copies of an entry relate.
enum class Replication {
  equal,     ///< the user's own tensors and values: must be the same on every rank, otherwise saving fails
  averaged,  ///< kept equal by averaging, but may drift: rank 0's copy is saved
  per_rank,  ///< each rank has its own: tensors are saved as [world_size, …], values as a list
};

/// A difference that prevents a saved state from being loaded.
struct Difference {
  std::string path;  ///< relative to the entry
  std::string text;
};
using Differences = std::vector<Difference>;

/// Adds a difference if the shape or type of the saved tensor is not the given one.
void compare_tensor(const std::string& path, const at::Tensor& saved, at::IntArrayRef shape, at::ScalarType type,
                    Differences& differences);

/// Like compare_tensor(). Also adds a difference if the tensor `here` is expanded and the saved values cannot be copied
/// to it.
void compare_values(const std::string& path, const at::Tensor& saved, const at::Tensor& here, at::ScalarType type,
                    Differences& differences);

/// An object with a state. Paths are relative to the entry: the path of a single tensor is "", and a single value is
/// the whole JSON.
struct Stateful {
  virtual ~Stateful() = default;
  virtual StateDict save(const ParameterPaths& parameters) const = 0;
  /// Gathers on this rank what save() reads, if each rank holds only a share of it. Collective.
  virtual void gather() {}
  /// Adds to `differences` what prevents `saved` from being loaded. Changes nothing else.
  virtual void compare(const StateDict& saved, const ParameterPaths& parameters, Differences& differences) const = 0;
  /// Called only if compare() has found no difference.
  virtual void load(const StateDict& saved, const ParameterPaths& parameters) = 0;

  /// Returns values by which a change of the object can be noticed quickly: its number of steps, or its value. Null if
  /// the object has none.
  virtual Json quick_values() const { return nullptr; }

  /// Returns the tensors for which an optimizer may have state, by path.
  virtual std::map<std::string, at::Tensor> parameters() const { return {}; }
  /// Returns a module's buffers by path; none for other objects.
  virtual std::map<std::string, at::Tensor> buffers() const { return {}; }
  virtual Replication replication() const { return Replication::equal; }
  /// For Replication::per_rank: divides a state that another number of ranks has saved, and returns the given rank's
  /// part; none if the state cannot be divided.
  virtual std::optional<StateDict> redistribute(const StateDict&, RankInGroup) const { return {}; }

  /// Returns a function that restores the present values of what the step of a schedule changes: an optimizer's
  /// options, such as learning rates, or a schedule's own counts. Empty for other objects. Call it while the object
  /// lives.
  virtual std::function<void()> keep_schedule() { return {}; }

  /// True if load() is the user's own code, which may throw for reasons that compare() cannot see.
  virtual bool may_throw() const { return false; }
};

inline Replication replication_of(const StateEntry& entry) {
  return entry.is_per_rank() ? Replication::per_rank : entry.object()->replication();
}

/// Converts a number, bool, string, JSON, pair of numbers, or optional of one of these. Numbers that JSON does not have
/// become the strings "inf", "-inf", "nan".
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

/// Sets `value` from JSON that value_to_json() has made. Returns false if the JSON is of another kind.
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

}  // namespace muster::detail::state
