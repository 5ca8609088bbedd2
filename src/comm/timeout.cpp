#include "comm/timeout.hpp"

#include "base/duration.hpp"
#include "comm/channel.hpp"

namespace muster::detail::comm {

void set_timeout(const Communicator& communicator, std::chrono::milliseconds timeout) {
  Channel::of(communicator)->world->limits.timeout = usable_timeout(timeout);
}

std::chrono::milliseconds timeout(const Communicator& communicator) {
  return Channel::of(communicator)->world->limits.timeout;
}

void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace) {
  Channel::of(communicator)->world->limits.final_grace = usable_timeout(grace);
}

std::chrono::milliseconds final_grace(const Communicator& communicator) {
  return Channel::of(communicator)->world->limits.final_grace;
}

}  // namespace muster::detail::comm
