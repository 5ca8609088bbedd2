// Writes state.h5. One rank writes each piece; in a large file, past the page cache if the file system supports that.
// While pieces are being written, the next pieces are copied to a buffer and their checksums are computed.
//
//   Layout layout = make_layout(tensors);                           // on one rank, which sends it to the others
//   tier.create(index, state_name, layout.bytes);                   // on the same rank
//   auto writers = plan_writers(layout.bytes, piece_owners(layout, ranks), node_of_rank);
//   auto rows = gather_rows(communicator, layout, tensors, writers);                      // collective
//   const OpenFile open = [&](auto alignment) { return tier.open(index, state_name, alignment); };
//   auto checksums = StateWriter().write(open, layout, tensors, pieces_of(writers, rank), rows);
#pragma once

#include "checkpoint/files/state_file.hpp"
#include "muster/communicator.hpp"
#include "storage/tier.hpp"

#include <array>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::checkpoint {

using OpenFile = std::function<std::unique_ptr<storage::SavedFile>(storage::Alignment)>;

/// Returns for each piece of the file the first rank whose rows of per-rank tensors lie in it, or −1 if there are none.
/// This is the argument `owners` of plan_writers().
std::vector<int> piece_owners(const Layout& layout, int ranks);

/// Returns the pieces that `rank` writes, in the order of the file.
std::vector<std::uint64_t> pieces_of(const std::vector<int>& writers, int rank);

/// Sends the rows of per-rank tensors to the ranks that write them. Returns the rows' bytes in the pieces that this
/// rank writes, in the order of the file; nothing if there is only one rank. Collective.
std::vector<FileBytes> gather_rows(const Communicator& communicator, const Layout& layout, const Tensors& tensors,
                                   const std::vector<int>& writers);

/// Writes pieces of state.h5. Keeps its buffers for the next save. Used by one thread at a time.
class StateWriter {
 public:
  /// Writes `pieces` durably to the file that `open` opens, and returns their checksums. The layout must fit the
  /// tensors (check_layout()). `rows`: the result of gather_rows(). While it waits for the disk, it calls `meanwhile`,
  /// which does a small piece of other work and returns false when there is none left.
  std::vector<std::uint32_t> write(const OpenFile& open, const Layout& layout, const Tensors& tensors,
                                   const std::vector<std::uint64_t>& pieces, const std::vector<FileBytes>& rows = {},
                                   const std::function<bool()>& meanwhile = {});

 private:
  /// Number of buffers: one is filled, one is written, one waits to be written.
  static constexpr std::size_t buffer_count = 3;

  /// Memory aligned for direct writes.
  struct Buffer {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> memory;
    std::size_t size = 0;
    std::span<std::byte> take(std::size_t bytes);
  };
  std::array<Buffer, buffer_count> buffers_;
};

}  // namespace muster::detail::checkpoint
