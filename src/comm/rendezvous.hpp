// How ranks make sure that they all come, before they make something together in which no alarm ends a wait: MPI's
// communicators, and what takes a handshake.
//
// A barrier is not enough: a rank may hear an alarm, or run out of time, in the moment in which the others see it
// complete, and they would then wait for it in MPI for good. So the first rank decides: it lets the others go once all
// have said that they are here, and a rank that wants to leave after that word has it back only from the first.
#pragma once

#include "muster/communicator.hpp"

namespace muster::detail::comm {

/// Returns on all ranks of the communicator, or on none: then it throws what ends a wait (RemoteError, or an Error with
/// ExitCode::retry past the limit of the launch, which begins with `doing`). Collective.
void rendezvous(const Communicator& communicator, const char* doing);

}  // namespace muster::detail::comm
