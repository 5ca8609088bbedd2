// Runs the nodes of a program one after the other, through torch's dispatcher: autograd and autocast see each operator.
#pragma once

#include "weights/exported/program.hpp"

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::gradients {
class SynchronisedOperator;
}

namespace muster::detail::weights::exported {

struct Settings {
  bool in_training = true;                 ///< or in evaluation, if the program was exported in training
  std::optional<c10::Device> device = {};  ///< takes the place of the devices in the program
  /// By Mode::batch_norm; empty if batch-norms are not synchronised.
  std::vector<std::shared_ptr<gradients::SynchronisedOperator>> batch_norms = {};
};

/// Consecutive nodes: those of one call of a submodule.
struct Block {
  std::size_t begin = 0, end = 0;
  std::vector<Slot> inputs = {};   ///< values from outside, parameters and buffers among them
  std::vector<Slot> outputs = {};  ///< values that others use
};

/// The calls of the submodule with that path, as in "layers.0", with those of its own submodules.
std::vector<Block> blocks_of(const Program& program, const std::string& module);

/// Runs the nodes of the block. `values` has its inputs, by slot, and then its outputs. Values that no node uses any
/// more are freed. What an operator throws is passed on, with the node's name and line.
void run(const Program& program, const Block& block, std::vector<c10::IValue>& values, const Settings& settings);

/// The operand's present value.
c10::IValue value_of(const Operand& operand, std::vector<c10::IValue>& values, const Settings& settings);

}  // namespace muster::detail::weights::exported
