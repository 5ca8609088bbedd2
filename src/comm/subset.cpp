#include "comm/subset.hpp"

#include "base/text.hpp"
#include "comm/channel.hpp"
#include "comm/world.hpp"
#include "muster/error.hpp"

#include <set>

namespace muster::detail::comm {

Communicator make_subset(const Communicator& over, const std::vector<int>& ranks) {
  constexpr auto doing = "making a communicator of some ranks";
  const std::set<int> all(ranks.begin(), ranks.end());
  if (!all.contains(over.rank()) || all.size() != ranks.size() || *all.begin() < 0 || *all.rbegin() >= over.size())
    throw Error(ExitCode::usage, doing,
                str("the list of ranks names a rank twice, or one that does not exist, or lacks this rank, ",
                    over.rank(), " of ", over.size()),
                "Make the call on the ranks of the list alone");
  const auto& channel = *Channel::of(over);
  require_in_use(*channel.world);
  return channel.open_part(ranks, doing);
}

}  // namespace muster::detail::comm
