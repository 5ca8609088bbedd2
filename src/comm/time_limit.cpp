#include "comm/time_limit.hpp"

#include "base/duration.hpp"
#include "comm/channel.hpp"

namespace muster::detail::comm {

void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit) {
  Channel::of(communicator)->world->limits.wait = usable_limit(limit);
}

std::chrono::milliseconds time_limit(const Communicator& communicator) {
  return Channel::of(communicator)->world->limits.wait;
}

void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace) {
  Channel::of(communicator)->world->limits.final_grace = usable_limit(grace);
}

std::chrono::milliseconds final_grace(const Communicator& communicator) {
  return Channel::of(communicator)->world->limits.final_grace;
}

}  // namespace muster::detail::comm
