// What a StateEntry refers to: an object that can be saved, compared with what was saved, and loaded.
#pragma once

#include "checkpoint/rank.hpp"
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
void compare_tensor(const std::string& path, const at::Tensor& saved, std::span<const std::int64_t> shape,
                    at::ScalarType type, Differences& differences);

/// An object with a state. Paths and JSON are relative to the entry: a single tensor has the path "", a single value is
/// that JSON.
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
  /// For Replication::per_rank: what rank `here` takes of what another number of ranks had; nothing where there is no
  /// such thing.
  virtual std::optional<StateDict> regroup(const StateDict&, Rank) const { return {}; }

  /// Whether load() is the user's own code, which may refuse what compare() cannot see.
  virtual bool may_refuse() const { return false; }
};

inline Replication replication_of(const StateEntry& entry) {
  return entry.is_per_rank() ? Replication::per_rank : entry.object()->replication();
}

}  // namespace muster::detail::checkpoint
