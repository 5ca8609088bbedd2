// The samples of an epoch as functions of numbers: which samples, in which order, on which rank. No state, no I/O.
//
// One order of the samples is the same on every rank; a step takes the next stretch of it and divides that among them.
// So a position is one number, the samples taken, and means the same at any number of ranks and any batch size.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace muster::detail::data {

/// Things that follow one another.
struct Range {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
/// What `rank` of `world` gets of `count` things: the first ranks get one more where they do not divide evenly.
Range share_of(std::int64_t count, int world, int rank) noexcept;

/// A permutation of 0 … size − 1 drawn from `key`, evaluated at an index in constant memory; the same on every machine.
///
/// A Feistel network over pairs (left, right) with left < a, right < b, a × b ≥ size, as in Black and Rogaway, "Ciphers
/// with arbitrary finite domains" (2002); what falls outside goes round again.
class Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t key) noexcept;
  std::int64_t operator()(std::int64_t index) const noexcept;

 private:
  static constexpr int rounds = 8;
  std::uint64_t size_, left_, right_;
  std::uint64_t keys_[rounds];
};

/// Another number for each pair, the same on every machine.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept;

/// How the samples of one pass are ordered.
struct OrderOptions {
  bool shuffle = false;              ///< a permutation of all
  std::int64_t window = 0;           ///< then one within each stretch of so many positions; none if 0
  std::uint64_t seed = 0;            ///< of the shuffle
  std::uint64_t window_seed = 0;     ///< of the windows
  std::uint64_t random_seed = 0;     ///< of what preprocessors and streams draw
  std::int64_t epoch = 0, pass = 0;  /// every pass of every epoch has another order
};

/// The sample at each position of a pass.
class Order {
 public:
  Order(std::int64_t size, const OrderOptions& options);
  std::int64_t operator()(std::int64_t position) const noexcept;
  std::int64_t size() const noexcept { return size_; }
  /// The seed of the random numbers of a batch that begins at that position, another one in each pass of each epoch.
  std::uint64_t random_seed(std::int64_t position) const noexcept;

 private:
  std::int64_t size_, window_;
  std::uint64_t window_key_, random_key_;
  std::optional<Permutation> shuffle_;
};

/// The samples of one step, as one rank sees them.
struct StepSamples {
  std::int64_t position = 0;  ///< where it begins
  std::int64_t samples = 0;   ///< that it takes, over all ranks
  Range mine;                 ///< positions of this rank; none if it is left empty
};
/// The step that begins at `position` < size and takes `global_batch` samples, or what is left.
StepSamples step_at(std::int64_t position, std::int64_t size, std::int64_t global_batch, int world, int rank) noexcept;
/// Steps from `position` to the end.
std::int64_t num_steps(std::int64_t position, std::int64_t size, std::int64_t global_batch, bool drop_last) noexcept;
/// The samples that the rank reads: its own, or the step's first if it has none, to have something to compute on.
std::vector<std::int64_t> samples_of(const StepSamples& step, const Order& order);

}  // namespace muster::detail::data
