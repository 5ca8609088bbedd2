// A description of a call, and its encoding as one 64-bit word. Ranks compare the words: if two differ, one rank is in
// a different call from the others.
#pragma once

#include "muster/error.hpp"
#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace muster::detail::node {

/// A call on a communicator, as ranks record it and compare it.
struct Call {
  enum class Kind : std::uint8_t {
    none,
    barrier,
    broadcast,
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    average_gradients,
    set_up,  ///< making a communicator or shared memory together
    end,     ///< end of an attempt, where all ranks agree on its outcome
    send,
    receive,
    read_stream,  ///< waiting for the user's reader of a stream; not a call on a communicator
  };

  Kind kind = Kind::none;
  Dtype type = Dtype::u8;
  ReduceOp op = ReduceOp::sum;
  int root = -1;          ///< root, or the rank on the other side of a message; −1 if there is none
  std::size_t count = 0;  ///< elements
  bool from_all = false;  ///< for an all_to_all: true if this rank receives from every other one

  /// Encodes the call; the word is 0 only for `none`. A count is cut to 35 bits and a root to 17 bits.
  std::uint64_t encode() const noexcept;
  /// Returns the call that this word encodes. A count or a root that was cut stays cut.
  static Call decode(std::uint64_t word) noexcept;
  /// True if all ranks of a communicator make the call together; false for a message between two ranks.
  bool is_collective() const noexcept { return kind != Kind::none && kind < Kind::send; }
  /// True only if the call cannot end here before all ranks have begun it.
  bool needs_all() const noexcept {
    return kind == Kind::barrier || kind == Kind::all_reduce || kind == Kind::average_gradients ||
           kind == Kind::set_up || from_all;
  }
  /// The kind in words, as in "averaging gradients".
  const char* name() const noexcept;
  /// As in "all_reduce(float32 [1024], sum)".
  std::string text() const;
};

/// Returns "1st" for 1, "2nd" for 2, ….
std::string nth(std::uint64_t number);

/// The error that two ranks have made different calls with the same call number.
class CallMismatch : public Error {
 public:
  using Error::Error;
};

/// Returns the error, the same on both ranks. `lower` and `higher`: the two ranks in ascending order, each with the
/// description of its call.
CallMismatch mismatch(int lower, const std::string& its_call, int higher, const std::string& other_call);

}  // namespace muster::detail::node
