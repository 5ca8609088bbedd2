// Parameters one behind the other in blocks of flat memory: what is averaged as a whole, whoever averages it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace muster::detail::gradients {

struct FlatLayout {
  /// Where a parameter lies.
  struct Range {
    std::size_t block = 0;
    std::size_t number = 0;  ///< among the members of the block
    std::size_t first = 0;   ///< element of the block
    std::size_t count = 0;   ///< elements
  };
  struct Block {
    std::vector<std::size_t> members;  ///< parameters, in the order in which they lie
    std::size_t count = 0;             ///< elements
  };

  std::vector<Range> ranges;  ///< [parameters]
  std::vector<Block> blocks;

  FlatLayout() = default;
  /// `members`: the parameters of each block. Every one is in one block, with others of its type and device.
  FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members);
};

/// The members of as few blocks as possible, in the order of parameters.
std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters);

/// The elements of a block from `first` on, in the parameter's shape, and in its order of memory where that has no
/// gaps, so that copies run straight through.
at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& block, std::size_t first);

}  // namespace muster::detail::gradients
