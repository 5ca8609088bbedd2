// Who writes what of a state file: a pure function of numbers, for two ranks as for ten thousand.
//
// What all ranks hold alike may be written by any of them, so only some write: of each node a few, and no more of them
// than have a share that is worth opening the file for. What one rank has of its own is written by a writer on its
// node, to whom it goes through the memory that they share. All writers write to one file. 420 MB and 64 GB on nodes of
// 64 ranks, as the test of this file prints it:
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
// Beside those each save makes one folder, two files and one name, whatever the number of ranks.
#pragma once

#include <cstdint>
#include <vector>

namespace muster::detail::checkpoint {

struct WriteLimits {
  int writers_of_a_node = 4;               ///< more do not write faster through one network card
  std::uint64_t least_share = 8ull << 20;  ///< of a writer, in bytes, but where there is one alone
};

/// The rank that writes each piece of a file. `owners` has for each piece the rank whose own it is, or −1 where all
/// have it alike; what is rank 0's it writes itself. `node_of_rank`: any number, equal where ranks share a node.
std::vector<int> plan_writers(std::uint64_t file_bytes, const std::vector<int>& owners,
                              const std::vector<int>& node_of_rank, const WriteLimits& limits = {});

}  // namespace muster::detail::checkpoint
