// Random chunks through random filters, whole and damaged: tests/support/chunk_fuzz.hpp.
//   chunk_storm SEED COUNT     COUNT chunks from this seed on; without end if COUNT is 0
// Ends with 1 if a chunk is decoded wrongly; after a crash the last line says from which seed on to look.
#include "support/chunk_fuzz.hpp"

#include <cstdio>
#include <cstdlib>
#include <exception>

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "chunk_storm SEED COUNT\n");
    return 64;
  }
  const auto first = std::strtoull(arguments[1], nullptr, 10), chunks = std::strtoull(arguments[2], nullptr, 10);
  try {
    for (auto seed = first; chunks == 0 || seed < first + chunks; ++seed) {
      if ((seed - first) % 10000 == 0) {
        std::printf("from seed %llu on\n", seed);
        std::fflush(stdout);
      }
      muster::test::fuzz_chunk(seed);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
