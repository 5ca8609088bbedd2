#include "comm/wait.hpp"

#include "comm/channel.hpp"
#include "muster/error.hpp"

namespace muster::comm {

void wait_for(const Communicator& communicator, const std::function<bool()>& ready,
              const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> limit) {
  const auto& channel = *communicator.channel();
  // What is quick is quicker than asking whether anybody has failed.
  if (spin_until(ready, channel.topology.local_size)) return;
  const auto longest = limit.value_or(std::chrono::milliseconds(channel.world->limit_ms.load()));
  const auto ready_or_alarm = [&] {
    // An operation of many steps waits in each of them, and a core that was given up comes back late.
    if (spin_until(ready, channel.topology.local_size)) return true;
    channel.world->alarm.check();
    return false;
  };
  if (!wait_until(ready_or_alarm, longest))
    throw Error(ExitCode::retry, doing(),
                "not finished within " + std::to_string(longest.count() / 1000.0).substr(0, 6) + " s on rank " +
                    std::to_string(channel.rank) + " of " + std::to_string(channel.size),
                "A rank is stuck, lost or in another collective; --timeout sets the limit");
}

}  // namespace muster::comm
