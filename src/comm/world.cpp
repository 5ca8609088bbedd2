#include "comm/world.hpp"

namespace muster::detail::comm {

void throw_outer_cause(const World& world) { throw remote_cause(world.outer->outcomes, world.placement.hosts); }

}  // namespace muster::detail::comm
