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

// Gradients that wait for an optimizer's step are saved beside the entries, as "gradients/" and the parameter's path.
inline constexpr const char* gradients_name = "gradients";
/// For a model whose program gives weights, with the path of one of its parameters: [2], the sum of all workers'
/// weights of the gradients, and the unit in which they are counted.
inline constexpr const char* weights_name = "gradient_weights";
std::string gradient_path(const std::string& parameter);
std::string weights_path(const std::string& parameter);

/// Returns the path of each parameter. A parameter with several paths gets the alphabetically first one, whatever the
/// order of the entries.
ParameterPaths parameter_paths(const StateEntries& entries);

/// Returns the state of all entries. Paths and JSON keys begin with the entry's name, and every entry has its JSON key.
/// Tensors share the objects' memory. A module has its parameters and buffers by name. An optimizer has its options per
/// group, and its state under the paths of the parameters: "optimizer/model/fc.weight/exp_avg". Throws an Error
/// (ExitCode::usage) for two entries with one name, or for an optimizer whose parameters belong to no entry.
MUSTER_INTERNAL_API StateDict collect(const StateEntries& entries);

/// Throws an Error (ExitCode::user_error) if a parameter holds the average of an EMA, since training that went on from
/// a save would train other weights.
void require_own_weights(const StateEntries& entries);

/// The Error for restoring a per-rank state on another number of ranks than saved it.
class WrongNumberOfRanks : public Error {
 public:
  WrongNumberOfRanks(std::size_t needed, const std::string& fact);
  /// Returns the number of ranks that saved the state.
  std::size_t needed() const noexcept { return needed_; }

 private:
  std::size_t needed_;
};

/// Compares `saved` with the entries. Throws an Error (ExitCode::data) that lists all differences: names that are
/// missing or left over, different shapes or types, and entries that are per-rank only here or only in `saved`.
/// `per_rank`: by name of the entry, whether it is per-rank in `saved`; an entry that is missing there is unknown.
MUSTER_INTERNAL_API void require_fit(const StateEntries& entries, const StateDict& saved, RankInGroup here = {},
                                     const std::map<std::string, bool>& per_rank = {});

/// Checks like require_fit(), then loads `saved` into the entries, into existing memory where there is some. The user's
/// own load functions are called first, so that nothing else has changed if one of them throws. If an optimizer's
/// parameters are not among the entries, they are matched by order. Of a per-rank entry it loads the part of rank
/// `here`; it refuses another number of ranks than saved it, or an unknown one (0).
MUSTER_INTERNAL_API void restore(const StateEntries& entries, const StateDict& saved, RankInGroup here = {},
                                 const std::map<std::string, bool>& per_rank = {});

/// Returns the name of the entry that a tensor belongs to: the first part of its path.
std::string entry_name_of(const std::string& path);

/// Returns the part of `state` that belongs to the entry with this name. Paths and keys keep the entry's name.
StateDict select_entry(const StateDict& state, const std::string& name);

/// Saved gradients and their batch weights, by parameter path.
struct SavedGradients {
  std::map<std::string, at::Tensor> gradients = {}, weights = {};
  int workers = 1;  ///< that have saved them
};
/// Removes them from a saved state and returns them. `workers`: that have saved it.
SavedGradients take_gradients(StateDict& state, int workers);

}  // namespace muster::detail::state
