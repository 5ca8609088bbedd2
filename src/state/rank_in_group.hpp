#pragma once

namespace muster::detail::state {

/// A rank and the number of ranks, which together identify a share of the work or a rank's part of an entry.
struct RankInGroup {
  int rank = 0;
  int size = 1;
};

}  // namespace muster::detail::state
