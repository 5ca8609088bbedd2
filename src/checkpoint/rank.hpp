// Which rank of how many: whose share of the work, whose part of an entry.
#pragma once

namespace muster::detail::checkpoint {

struct Rank {
  int rank = 0;
  int size = 1;
};

}  // namespace muster::detail::checkpoint
