#include "gradients/notes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace muster::detail::gradients {
namespace {

constexpr int weight_fraction_bits = 86;

// The parts of the last numbers.
template <class Number>
std::span<Number> flags_in(std::span<Number> numbers) {
  return numbers.last(Notes::tail).first(flag_bits);
}
template <class Number>
std::span<Number> weight_in(std::span<Number> numbers) {
  return numbers.last(Notes::tail).subspan(flag_bits, Notes::weight_bits);
}
template <class Number>
std::span<Number> word_in(std::span<Number> numbers) {
  return numbers.last(Notes::word_bits);
}

void put_bits(std::uint32_t bits, std::span<float> numbers) {
  for (std::size_t bit = 0; bit < numbers.size(); ++bit) numbers[bit] = static_cast<float>(bits >> bit & 1);
}
std::uint32_t bits_of(std::span<const float> numbers) {
  std::uint32_t bits = 0;
  for (std::size_t bit = 0; bit < numbers.size(); ++bit) bits |= static_cast<std::uint32_t>(numbers[bit] > 0) << bit;
  return bits;
}

}  // namespace

void Notes::begin(Flags flags, double weight) {
  std::ranges::fill(numbers().last(tail), 0.0F);
  set_flags(flags);
  int exponent = 0;
  constexpr int digits = std::numeric_limits<double>::digits;
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(weight, &exponent), digits));
  for (int bit = 0; bit < digits; ++bit) {
    const int place = exponent - digits + bit + weight_fraction_bits;
    if ((mantissa >> bit & 1) != 0 && place >= 0 && place < weight_bits)
      weight_in(numbers())[static_cast<std::size_t>(place)] = 1;
  }
}

void Notes::set_flags(Flags flags) { put_bits(flags, flags_in(numbers())); }
void Notes::set_word(std::uint32_t word) { put_bits(word, word_in(numbers())); }

/// NaN if abandoned, so that the sum is NaN, too.
void Notes::set_use(std::size_t gradient, ParameterUse use) {
  numbers_[gradient] = use == ParameterUse::abandoned ? std::numeric_limits<float>::quiet_NaN()
                                                      : static_cast<float>(use == ParameterUse::used);
}

int Notes::user_count(std::size_t gradient) const {
  return std::isnan(numbers_[gradient]) ? -1 : static_cast<int>(numbers_[gradient]);
}

bool Notes::any_abandoned() const {
  return std::ranges::any_of(numbers_, [](float number) { return std::isnan(number); });
}

Flags Notes::flags() const { return bits_of(flags_in(numbers())); }
std::uint32_t Notes::word() const { return bits_of(word_in(numbers())); }

double Notes::weight() const {
  double weight = 0;
  const auto places = weight_in(numbers());
  for (int place = 0; place < weight_bits; ++place)
    weight += std::ldexp(places[static_cast<std::size_t>(place)], place - weight_fraction_bits);
  return weight;
}

bool Notes::all_words_equal(int ranks) const {
  return std::ranges::all_of(word_in(numbers()),
                             [&](float sum) { return sum == 0 || sum == static_cast<float>(ranks); });
}

}  // namespace muster::detail::gradients
