// What stands behind a StateEntry: one object that can be saved, compared with what was saved, and loaded.
#pragma once

#include "checkpoint/pieces.hpp"
#include "muster/state.hpp"

#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

/// Where in the state each parameter stands: what optimizers name their own state after.
using ParameterPaths = std::map<const c10::TensorImpl*, std::string>;

/// How the ranks' copies of an entry stand to each other.
enum class Copies {
  equal,     ///< the user's own: the same on every rank, or it is not saved
  averaged,  ///< kept alike by averaging, but for drift: rank 0's is saved
  own,       ///< each rank has its own: saved as [world, …], values as a list
};

/// Something that keeps a saved state from being loaded.
struct Difference {
  std::string path;  ///< relative to the entry
  std::string text;
};
using Differences = std::vector<Difference>;

/// Notes a shape or a type that is not the one here.
void compare_tensor(const std::string& path, const at::Tensor& saved, std::span<const std::int64_t> shape,
                    at::ScalarType type, Differences& differences);

/// JSON knows no infinity and no NaN; here they are the strings "inf", "-inf", "nan".
Json number_to_json(double value);
std::optional<double> number_from_json(const Json& json);

}  // namespace muster::detail::checkpoint

namespace muster {

/// Paths and JSON are relative to the entry. An object that is a single tensor has the path ""; one that is a single
/// value is that JSON.
struct StateEntry::Object {
  virtual ~Object() = default;
  virtual StateDict save(const detail::checkpoint::ParameterPaths& parameters) const = 0;
  /// Changes nothing.
  virtual void compare(const StateDict& saved, const detail::checkpoint::ParameterPaths& parameters,
                       detail::checkpoint::Differences& differences) const = 0;
  /// Only after compare() has found no difference.
  virtual void load(const StateDict& saved, const detail::checkpoint::ParameterPaths& parameters) = 0;

  /// The tensors that an optimizer may own the state of, by path.
  virtual std::map<std::string, at::Tensor> parameters() const { return {}; }
  virtual detail::checkpoint::Copies copies() const { return detail::checkpoint::Copies::equal; }
  /// For Copies::own: what rank `here` takes of what another number of ranks had; nothing where there is no such thing.
  virtual std::optional<StateDict> regroup(const StateDict&, detail::checkpoint::Part) const { return {}; }

  /// Whether load() is the user's own code, which may refuse what compare() cannot see.
  virtual bool may_refuse() const { return false; }
};

}  // namespace muster
