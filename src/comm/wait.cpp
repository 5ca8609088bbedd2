#include "comm/wait.hpp"

#include "comm/channel.hpp"
#include "comm/hierarchy.hpp"
#include "muster/error.hpp"

#include <atomic>

namespace muster::detail::comm {
namespace {

std::atomic<bool> suffice_{false};

}  // namespace

bool cores_suffice() noexcept { return suffice_.load(std::memory_order_relaxed); }
void set_cores_suffice(bool suffice) noexcept { suffice_ = suffice; }

void wait_for(const Communicator& communicator, const std::function<bool()>& ready,
              const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> limit) {
  auto& channel = *communicator.channel();
  const auto longest = limit.value_or(std::chrono::milliseconds(channel.world->limit_ms.load()));
  const auto advanced = [&] {
    advance_over_nodes(channel);
    return ready();
  };
  if (!wait_until(advanced, longest, [&] { channel.world->alarm.check(); }))
    throw Error(ExitCode::retry, doing(),
                "not finished within " + std::to_string(longest.count() / 1000.0).substr(0, 6) + " s on rank " +
                    std::to_string(channel.rank) + " of " + std::to_string(channel.size),
                "A rank is stuck, lost or in another collective; --timeout sets the limit");
}

}  // namespace muster::detail::comm
