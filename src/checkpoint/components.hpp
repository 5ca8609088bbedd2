// Objects to state and back.
#pragma once

#include "muster/state.hpp"

namespace muster::checkpoint {

/// The state of all entries; paths and JSON keys begin with the entry's name. Tensors share the objects' memory.
/// An Error (ExitCode::usage) for two entries of one name, or an optimizer whose parameters no module here has.
StateDict collect(const StateEntries& entries);

/// Loads `saved` into the entries. First everything is compared: a name missing or left over, a shape or a type that
/// differs is an Error (ExitCode::data) that lists all of them, and nothing has been changed.
void restore(const StateEntries& entries, const StateDict& saved);

}  // namespace muster::checkpoint
