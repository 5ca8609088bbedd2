// The operations of a reduction.
#pragma once

namespace muster {

enum class ReduceOp { sum, product, min, max, bit_and, bit_or, bit_xor };

}  // namespace muster
