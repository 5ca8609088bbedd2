#include "comm/world.hpp"

#include "comm/progress.hpp"
#include "muster/error.hpp"

#include <unistd.h>

#include <utility>

namespace muster::detail::comm {

World::World(std::shared_ptr<Pool> its_pool, std::vector<int> its_members,
             std::vector<PooledCommunicator> communicators, Placement where)
    : pool(std::move(its_pool)),
      members(std::move(its_members)),
      alarm(std::move(communicators[0])),
      agreement(std::move(communicators[1])),
      wait_monitor(std::move(communicators[2]), where),
      placement(std::move(where)) {
  prepare_progress();
}

void throw_outer_cause(const World& world) { throw remote_cause(world.outer->outcomes, world.placement.hosts); }

void require_in_use(const World& world) {
  require_progress("calling ", "the other ranks");
  if (world.use == World::Use::open) return;
  while (world.use == World::Use::left_behind) ::pause();
  throw Error(ExitCode::retry, "calling the other ranks", "this rank has given up the work that they did together",
              "The warning before this says why");
}

}  // namespace muster::detail::comm
