// Plans which rank writes which piece of a state file. The plan depends on numbers only, so it can be computed for any
// number of ranks.
//
// Any rank could write replicated data, so only some ranks do: a few of each node, and only as many as get enough bytes
// to make opening the file worth it. Per-rank data goes through shared memory to a writer on the node of its rank, if
// there is one. All writers write to one file. The test of this file prints the plans for 420 MB and 64 GB on nodes of
// 64 ranks. "most bytes of one" is what the busiest writer writes, "opened" is how often state.h5 is opened for
// writing, and "synced" counts the calls of fsync:
//
//     ranks  nodes     bytes  writers  on nodes  most bytes of one  opened  synced
//         1      1    420 MB        1         1             420 MB       1       4
//         2      1    420 MB        2         1             210 MB       2       5
//        10      1    420 MB        4         1             105 MB       4       7
//       100      2    420 MB        8         2              53 MB       8      11
//      1000     16    420 MB       50        16               9 MB      50      53
//     10000    157    420 MB       50        50               9 MB      50      53
//      1000     16  64000 MB       64        16            1002 MB      64      67
//     10000    157  64000 MB      628       157             105 MB     628     631
//
// In addition, each save creates one folder and two files and renames the folder, whatever the number of ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace muster::detail::checkpoint {

/// How many ranks may write at once.
struct WriteLimits {
  int max_writers_per_node = 4;                ///< at most; more do not write faster through one network card
  std::uint64_t min_share_bytes = 8ull << 20;  ///< at least as many bytes for each writer, unless there is only one
};

/// Returns for each piece of a file the rank that writes it. `owners`: for each piece, the rank that has its data, or
/// −1 if the data is replicated. Rank 0 writes its own pieces itself. `node_of_rank`: any numbers, equal for ranks of
/// the same node.
std::vector<int> plan_writers(std::uint64_t file_bytes, const std::vector<int>& owners,
                              const std::vector<int>& node_of_rank, const WriteLimits& limits = {});

}  // namespace muster::detail::checkpoint
