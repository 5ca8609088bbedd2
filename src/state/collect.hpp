// Converts objects to state and back.
#pragma once

#include "base/export.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"
#include "state/rank_in_group.hpp"
#include "state/stateful.hpp"

#include <map>
#include <string>

namespace muster::detail::state {

// Gradients with which no optimizer has stepped yet are saved beside the entries, as "gradients/" and the parameter's
// path.
inline constexpr const char* gradients_name = "gradients";
/// If the program gives weights for a model's batches (Session::step), a tensor [2] is saved beside the model's
/// gradients, under the path of one of its parameters: the sum of all workers' weights, and the unit in which the
/// weights are counted.
inline constexpr const char* weights_name = "gradient_weights";
std::string gradient_path(const std::string& parameter);
std::string weights_path(const std::string& parameter);

/// Returns the path of each parameter. A parameter with several paths gets the alphabetically first one, whatever the
/// order of the entries.
ParameterPaths parameter_paths(const StateEntries& entries);

/// Gathers on this rank the state that the ranks hold in shares, so that collect() sees all of it. Collective.
MUSTER_INTERNAL_API void gather(const StateEntries& entries);

/// Returns the state of all entries. Paths of tensors begin with the entry's name, and every entry has a JSON key, its
/// name. Tensors share the objects' memory. A module has its parameters and buffers by name. An optimizer has its
/// options per group, and its state under the paths of the parameters: "optimizer/model/fc.weight/exp_avg". Throws an
/// Error (ExitCode::usage) for a name that is not allowed or is given twice, for an undefined tensor, or for an
/// optimizer whose parameters belong to no entry.
MUSTER_INTERNAL_API StateDict collect(const StateEntries& entries);

/// Throws an Error (ExitCode::user_error) if a parameter holds the average of an EMA (a scope of EMA::apply() is
/// alive): a run that resumes from a checkpoint with averages would train these instead of the model's own weights.
void require_own_weights(const StateEntries& entries);

/// The Error that a per-rank state cannot be restored, because another number of ranks has saved it.
class WrongNumberOfRanks : public Error {
 public:
  WrongNumberOfRanks(std::size_t needed, const std::string& fact);
  /// Returns the number of ranks that saved the state.
  std::size_t needed() const noexcept { return needed_; }

 private:
  std::size_t needed_;
};

/// Compares `saved` with the entries. Throws an Error (ExitCode::data) that counts the differences and names the first
/// five: names that are missing or left over, different shapes or types, and entries that are per-rank only here or
/// only in `saved`. Of a per-rank entry, compares the part of rank `here`, as in restore(). `per_rank`: by the entry's
/// name, true if the entry is per-rank in `saved`. For entries that are not in the map, this is unknown and is not
/// compared.
MUSTER_INTERNAL_API void require_fit(const StateEntries& entries, const StateDict& saved, RankInGroup here = {},
                                     const std::map<std::string, bool>& per_rank = {});

/// Checks like require_fit(), then loads `saved` into the entries; tensors that exist already keep their memory, except
/// LBFGS's. The user's own load functions are called first, so that nothing else has changed if one of them throws. If
/// no entry has parameters, an optimizer's parameters are matched by their order. Of a per-rank entry, loads the part
/// of rank `here`. Throws an Error if another number of ranks has saved the entry and it cannot be divided anew, or if
/// the size of `here` is 0, which means that the rank is unknown.
MUSTER_INTERNAL_API void restore(const StateEntries& entries, const StateDict& saved, RankInGroup here = {},
                                 const std::map<std::string, bool>& per_rank = {});

/// Returns the name of the entry that a tensor belongs to: the first part of its path.
std::string entry_name_of(const std::string& path);

/// Returns the part of `state` that belongs to the entry with this name. Paths and keys keep the entry's name.
StateDict select_entry(const StateDict& state, const std::string& name);

/// Saved gradients and their batch weights, by parameter path.
struct SavedGradients {
  std::map<std::string, at::Tensor> gradients = {}, weights = {};
  int workers = 1;  ///< the number of workers that have saved them
};
/// Removes the gradients and weights from a saved state and returns them. `workers`: how many workers have saved it.
SavedGradients take_gradients(StateDict& state, int workers);

}  // namespace muster::detail::state
