// Objects to state and back.
#pragma once

#include "checkpoint/files/pieces.hpp"
#include "muster/error.hpp"
#include "muster/state.hpp"

#include <string>

namespace muster::detail::checkpoint {

/// The state of all entries; paths and JSON keys begin with the entry's name, and every entry has its JSON key.
/// Tensors share the objects' memory. An Error (ExitCode::usage) for two entries of one name, or an optimizer whose
/// parameters no entry here has. A module gives its parameters and buffers by name; an optimizer its options per group,
/// and its state under the path of the parameter: "optimizer/model/fc.weight/exp_avg".
StateDict collect(const StateEntries& entries);

/// A state of which each rank has its own part is restored on another number of ranks.
class WrongNumberOfRanks : public Error {
 public:
  WrongNumberOfRanks(std::size_t needed, const std::string& fact);
  /// How many ranks have saved it.
  std::size_t needed() const noexcept { return needed_; }

 private:
  std::size_t needed_;
};

/// Compares `saved` with the entries: a name missing or left over, a shape or a type that differs is an Error
/// (ExitCode::data) that lists all of them.
void require_fit(const StateEntries& entries, const StateDict& saved, Rank here = {});

/// Loads `saved` into the entries, in place where there is memory, after require_fit(). The user's own load functions
/// come first, so that nothing else has been changed when one of them throws. An optimizer without its parameters among
/// the entries is matched by the order of its parameters. Of what each rank had of its own, this one takes the part of
/// rank `here`; it is refused at another number of ranks, or an unknown (0).
void restore(const StateEntries& entries, const StateDict& saved, Rank here = {});

/// The entry that a tensor belongs to: the first part of its path.
std::string entry_of(const std::string& path);

/// What of `state` belongs to the entry of that name, as the state of a checkpoint that holds nothing else.
StateDict only(const StateDict& state, const std::string& name);

}  // namespace muster::detail::checkpoint
