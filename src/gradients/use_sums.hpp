// How uses and flags travel where gradients are summed: as numbers beside them, whose sums over the ranks tell what
// all ranks have said.
#pragma once

#include "gradients/exchange.hpp"

#include <cmath>
#include <limits>
#include <span>

namespace muster::detail::gradients {

inline float summand_of(Use use) {
  return use == Use::abandoned ? std::numeric_limits<float>::quiet_NaN() : static_cast<float>(use == Use::used);
}
/// As Exchange::users().
inline int users_of(float sum) { return std::isnan(sum) ? -1 : static_cast<int>(sum); }

inline void put_flags(Flags flags, std::span<float> summands) {
  for (std::size_t bit = 0; bit < summands.size(); ++bit) summands[bit] = static_cast<float>(flags >> bit & 1);
}
inline Flags flags_of(std::span<const float> sums) {
  Flags flags = 0;
  for (std::size_t bit = 0; bit < sums.size(); ++bit) flags |= static_cast<Flags>(sums[bit] > 0) << bit;
  return flags;
}

}  // namespace muster::detail::gradients
