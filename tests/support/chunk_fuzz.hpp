// Random chunks through random filters, whole and damaged.
#pragma once

#include <cstdint>

namespace muster::test {

/// Encodes a random chunk with random filters, decodes it and compares; then damages what is stored, several times, and
/// decodes that into memory behind which nothing may be written. Throws if a whole chunk decodes to something else.
/// `seed` chooses everything.
void fuzz_chunk(std::uint64_t seed);

}  // namespace muster::test
