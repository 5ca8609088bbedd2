// What a collective is, in one word that ranks compare: of two that differ, a rank is in another than the rest.
#pragma once

#include "muster/error.hpp"
#include "muster/reduce_op.hpp"
#include "node/dtype.hpp"

#include <cstddef>
#include <cstdint>
#include <string>

namespace muster::detail::node {

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
    average,  ///< of gradients
    meet,     ///< to make something together
    end,      ///< of an attempt, in which all ranks agree how it went
    send,
    receive,
    read_stream,  ///< no call of a communicator: it waits for the reader of a stream, which is the user's
  };

  Kind kind = Kind::none;
  Dtype type = Dtype::u8;
  ReduceOp op = ReduceOp::sum;
  int root = -1;          ///< or the other side; −1 where there is none
  std::size_t count = 0;  ///< elements
  bool from_all = false;  ///< of an all_to_all: this rank receives from every other one

  /// Never 0 but for `none`. A count from 2^35 and a root from 2^17 on are cut.
  std::uint64_t word() const noexcept;
  static Call of(std::uint64_t word) noexcept;
  /// Whether all ranks of a communicator call it alike: messages from rank to rank are not counted among its calls.
  bool collective() const noexcept { return kind != Kind::none && kind < Kind::send; }
  /// Whether this rank cannot end it before all have begun it.
  bool needs_all() const noexcept {
    return kind == Kind::barrier || kind == Kind::all_reduce || kind == Kind::average || kind == Kind::meet || from_all;
  }
  /// As in "all_reduce(float32 [1024], sum)".
  std::string text() const;
};

/// "1st", "2nd", ….
std::string nth(std::uint64_t number);

/// Of two ranks that are in different calls of the same number; the same on both.
Error mismatch(int lower, const std::string& its_call, int higher, const std::string& other_call);

}  // namespace muster::detail::node
