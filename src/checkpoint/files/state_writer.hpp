// Writing state.h5: each piece by one rank, past the system's cache where the file system takes that. While pieces are
// on their way to the disk the next ones are put together, and their checksums taken.
//
//   Layout layout = lay_out(tensors);                           // one rank, which tells the others
//   create_state_file(path, layout);                            // the same one
//   auto writers = plan_writers(layout.bytes, piece_owners(layout, ranks), node_of_rank);
//   auto rows = gather_rows(communicator, layout, tensors, writers);                      // collective
//   auto checksums = StateWriter().write(path, layout, tensors, pieces_of(writers, rank), rows);
#pragma once

#include "checkpoint/files/state_file.hpp"
#include "muster/communicator.hpp"

#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace muster::detail::checkpoint {

/// Makes the file, as long as it will be, with space for a large one; without, where ranks of one node write a part of
/// it. It is empty.
void create_state_file(const std::filesystem::path& path, const Layout& layout, bool with_space = true);

/// For each piece of the file the rank whose own it holds first, −1 where it holds none's: what plan_writers() asks
/// for.
std::vector<int> piece_owners(const Layout& layout, int ranks);

/// The pieces of one writer, in the order of the file.
std::vector<std::uint64_t> pieces_of(const std::vector<int>& writers, int rank);

/// Brings what each rank has of its own to whom writes it: of all such tensors the bytes in this rank's pieces, in the
/// order of the file; nothing where there is one rank. Collective.
std::vector<Stretch> gather_rows(const Communicator& communicator, const Layout& layout, const Tensors& tensors,
                                 const std::vector<int>& writers);

/// Holds the memory through which it writes, so that the next save finds it there. One thread at a time.
class StateWriter {
 public:
  /// Writes these pieces, durably, and gives their checksums. The file was laid out for these tensors (check_layout());
  /// `rows` is what gather_rows() gave. Where it waits for the disk it calls `meanwhile`, which does a little of
  /// something else and gives false when there is no more of it.
  std::vector<std::uint32_t> write(const std::filesystem::path& path, const Layout& layout, const Tensors& tensors,
                                   const std::vector<std::uint64_t>& pieces, const std::vector<Stretch>& rows = {},
                                   const std::function<bool()>& meanwhile = {});

 private:
  static constexpr std::size_t depth = 3;  ///< one is filled, one is on its way, one is ready to be

  /// Memory that can be written directly.
  struct Buffer {
    struct Free {
      void operator()(std::byte* memory) const { std::free(memory); }
    };
    std::unique_ptr<std::byte, Free> memory;
    std::size_t size = 0;
    std::span<std::byte> take(std::size_t bytes);
  };
  std::array<Buffer, depth> buffers_;
};

}  // namespace muster::detail::checkpoint
