// The description of a random training program: everything that it does, on all ranks, drawn from one seed.
//
// The program keeps the contract of the public headers: all ranks run the same passes in the same order, each rank
// reaches a parameter of each model in a pass, and changes between steps are the same on all ranks. Everything that may
// differ by rank does: which parameters are used, in which order, the sizes of batches, and which ranks throw.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster::soak {

/// A part of a model. It maps x to x + f(x).
struct Branch {
  enum class Kind { linear, wide, scale, shift, embedding, sparse_embedding, tied, transposed, convolution, norm };
  Kind kind = Kind::linear;
  int size = 1;         ///< the size that the model's width does not give: hidden units, rows or channels
  bool frozen = false;  ///< from the beginning
};

struct Model {
  int width = 1;
  std::vector<Branch> branches;
};

struct OptimizerSetting {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0, beta1 = 0.9, beta2 = 0.99, eps = 1e-8;
  bool nesterov = false;
};

/// What one rank does in a pass.
struct Part {
  int samples = 1;                         ///< rows of the batch
  int weight = 1;                          ///< samples that count; 0: a ghost batch
  double given = 0;                        ///< the weight that the program gives
  std::uint64_t data = 0;                  ///< seed of the batch
  std::vector<std::vector<int>> branches;  ///< [models] branches used, in this order
  std::vector<int> models;                 ///< models used, in this order
  int throws_at =
      -1;  ///< the exception comes before the gradient of this branch of the first model, counted from the end
};

struct Pass {
  bool sync = true;
  bool weighted = false;  ///< otherwise all ranks count the same
  bool given = false;     ///< the program gives weights, which count instead
  enum class Throws { none, everywhere, somewhere } throws = Throws::none;
  std::vector<Part> ranks;
};

/// What a user does to the weights between steps.
struct Change {
  enum class Kind { in_place, pointer, data, other_memory, transposed_memory };
  Kind kind = Kind::in_place;
  int model = 0;
  int parameter = 0;  ///< modulo the number of parameters
};

enum class Zero { no, to_none, in_place };

struct Step {
  std::vector<OptimizerSetting> settings;   ///< [models], empty: unchanged
  std::vector<std::pair<int, int>> toggle;  ///< model, branch: frozen or unfrozen
  Zero before = Zero::to_none;
  std::vector<Pass> discarded;  ///< passes that zero_grad throws away
  std::vector<Pass> passes;
  std::vector<int> steps;  ///< models whose optimizers step
  std::vector<Change> changes;
  bool evaluate = false;
};

struct Program {
  std::uint64_t seed = 0;
  int ranks = 1;
  std::vector<Model> models;
  enum class Optimizer { sgd, adam, adamw } optimizer = Optimizer::sgd;
  bool fuse = false;
  double max_grad_norm = 0;
  enum class Exchange { shared, buckets, hook } exchange = Exchange::shared;
  bool progress_thread = false;
  int bucket_bytes = 0;
  enum class Given { never, always, at_times } given = Given::never;  ///< weights; at times only if nothing is fused
  std::vector<OptimizerSetting> settings;                             ///< [models]
  std::vector<Step> steps;
};

/// The program of this seed for this number of ranks.
Program draw(std::uint64_t seed, int ranks);

/// A description in a few lines, for debugging.
std::string describe(const Program& program);
std::string describe(const Step& step);

}  // namespace muster::soak
