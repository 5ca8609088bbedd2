// Weights that the program gives to batches. Gradients are multiplied by them, and the averages divided by their mean.
#pragma once

#include "gradients/notes.hpp"
#include "step/batch_weight.hpp"

namespace muster::detail::gradients {

struct GivenWeights {
  bool given = false;   ///< true if the program gave a weight to the batch of the last round
  double unit = 0;      ///< power of two, the same on all ranks, that brings weights near 1, which 16 bits need
  double sum = 0;       ///< of this rank's weights, each times `unit`, over the rounds since the last average
  double relative = 1;  ///< this rank's weight in the last average; 1 is an even share
  bool warned = false;  ///< true if a warning has said that all were 0

  /// Adds the weight of the batch of a round that begins. `goes_on`: true if the round adds to gradients that are not
  /// averaged yet. `left`: true if .grad holds gradients without a weight. Throws an Error, before it changes anything,
  /// if weights are mixed.
  void begin(const step::BatchWeight& batch, bool goes_on, bool left);
  /// Ends a round that all ranks have finished, with this mean of their weights; false if all weights are 0.
  /// `is_joined`: true inside join().
  bool end(double mean, bool is_joined);
  /// Throws an Error if the flags of all ranks say that only some gradients have weights.
  static void require_alike(Flags flags);
};

}  // namespace muster::detail::gradients
