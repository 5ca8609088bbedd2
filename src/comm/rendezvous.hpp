// Waiting for all ranks of a communicator before they make something together.
#pragma once

#include "muster/communicator.hpp"

namespace muster::detail::comm {

/// Makes sure that all ranks have come. A barrier is not enough: a rank may see an alarm, or time out, in the moment in
/// which the others see the barrier complete, and they would then wait for it in MPI for ever. So rank 0 decides. It
/// lets the others go once all have told it that they are here. A rank that wants to leave after it has told rank 0
/// must ask rank 0 first.
///
/// Returns on all ranks of the communicator or throws on all: RemoteError, or, past the launch's timeout, an Error
/// (ExitCode::retry) whose text begins with `doing`. Collective.
void wait_for_all_ranks(const Communicator& communicator, const char* doing);

}  // namespace muster::detail::comm
