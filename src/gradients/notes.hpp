// What the ranks tell each other in a round beside the gradients: the use of each gradient, flags, a weight and a word.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace muster::detail::gradients {

/// Whether this rank's samples have used the parameter.
enum class ParameterUse : std::uint32_t {
  unused,
  used,
  abandoned,  ///< unknown: an exception has ended this rank's backward()
};

/// Bits that each rank sends along with its gradients. After the round, every rank has the OR over all ranks.
using Flags = std::uint32_t;
constexpr int flag_bits = 5;
constexpr Flags stop_requested = 1;        ///< this rank is asked to stop
constexpr Flags gradients_changed = 2;     ///< gradients that backward() left to an optimizer were changed by hand
constexpr Flags gradients_weighted = 4;    ///< this rank's gradients are multiplied by a weight that the program gives
constexpr Flags gradients_unweighted = 8;  ///< this rank's gradients have no such weight
constexpr Flags gradients_stale = 16;      ///< gradients have changed since the exchange was given them

/// True if the flags of all ranks contain both of two that exclude each other.
constexpr bool has_both(Flags flags, Flags one, Flags other) { return (flags & one) != 0 && (flags & other) != 0; }

/// This rank's notes or, once an exchange has summed their numbers over the ranks, those of all ranks. Every number is
/// small, so its sum is exact in any type that sums integers exactly (bfloat16: up to 256 ranks).
class Notes {
 public:
  explicit Notes(std::size_t gradients) : numbers_(gradients + tail) {}

  /// Begins a round, with the word 0.
  void begin(Flags flags, double weight);
  void set_flags(Flags flags);
  void set_use(std::size_t gradient, ParameterUse use);
  /// See SharedExchange::set_check_word().
  void set_word(std::uint32_t word);

  /// A number for each gradient, then `tail` numbers for all else.
  std::span<float> numbers() noexcept { return numbers_; }
  std::span<const float> numbers() const noexcept { return numbers_; }
  /// A bit of the flags or of the word is a number. A weight is a fixed-point number, and each of its bits a number.
  static constexpr int weight_bits = 160, word_bits = 32, tail = flag_bits + weight_bits + word_bits;

  // Of this rank, or of all ranks.
  /// How many ranks have used the gradient; -1 if a rank has abandoned the round.
  int user_count(std::size_t gradient) const;
  bool any_abandoned() const;
  Flags flags() const;         ///< the OR
  double weight() const;       ///< the sum
  std::uint32_t word() const;  ///< the OR
  /// True if all ranks, this many, have the same word.
  bool all_words_equal(int ranks) const;

 private:
  std::vector<float> numbers_;
};

}  // namespace muster::detail::gradients
