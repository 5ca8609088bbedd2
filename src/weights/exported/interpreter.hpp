// Runs the nodes of a program one after the other, through torch's dispatcher: autograd and autocast see each operator.
#pragma once

#include "weights/exported/program.hpp"

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::gradients {
class SynchronisedOperator;
}

namespace muster::detail::weights::exported {

struct Settings {
  bool in_training = true;                 ///< false: in evaluation, though exported in training; true: as exported
  std::optional<c10::Device> device = {};  ///< takes the place of the devices in the program
  /// Indexed by Mode::batch_norm; empty if batch-norms are not synchronised.
  std::vector<std::shared_ptr<gradients::SynchronisedOperator>> batch_norms = {};
};

/// Runs the nodes from `begin` to before `end`. `values` has, by slot, what they use, and afterwards what they return.
/// Values that no node uses any more are freed. Adds the node's name and line to a c10::Error of an operator.
void run(const Program& program, std::size_t begin, std::size_t end, std::vector<c10::IValue>& values,
         const Settings& settings);

/// The operand's present value, which is moved out of `values` at its last use.
c10::IValue value_of(const Operand& operand, std::vector<c10::IValue>& values, const Settings& settings);

}  // namespace muster::detail::weights::exported
