#include "gradients/notes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace muster::detail::gradients {
namespace {

constexpr int weight_fraction_bits = 86;

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
  std::ranges::fill(part(0, tail), 0.0F);
  set_flags(flags);
  int exponent = 0;
  constexpr int digits = std::numeric_limits<double>::digits;
  const auto mantissa = static_cast<std::uint64_t>(std::ldexp(std::frexp(weight, &exponent), digits));
  for (int bit = 0; bit < digits; ++bit) {
    const int place = exponent - digits + bit + weight_fraction_bits;
    if ((mantissa >> bit & 1) != 0 && place >= 0 && place < weight_bits) part(flag_bits + place, 1)[0] = 1;
  }
}

void Notes::set_flags(Flags flags) { put_bits(flags, part(0, flag_bits)); }
void Notes::set_word(std::uint32_t word) { put_bits(word, part(flag_bits + weight_bits, word_bits)); }

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

Flags Notes::flags() const { return bits_of(part(0, flag_bits)); }
std::uint32_t Notes::word() const { return bits_of(part(flag_bits + weight_bits, word_bits)); }

double Notes::weight() const {
  double weight = 0;
  const auto places = part(flag_bits, weight_bits);
  for (int place = 0; place < weight_bits; ++place)
    weight += std::ldexp(places[static_cast<std::size_t>(place)], place - weight_fraction_bits);
  return weight;
}

bool Notes::all_words_equal(int ranks) const {
  return std::ranges::all_of(part(flag_bits + weight_bits, word_bits),
                             [&](float sum) { return sum == 0 || sum == static_cast<float>(ranks); });
}

}  // namespace muster::detail::gradients
