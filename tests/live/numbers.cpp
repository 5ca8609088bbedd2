// The trainer of numbers.f90: it looks at a sample, and asks the solver to stop.
#include "muster/live.hpp"
#include "muster/muster.hpp"

#include <malloc.h>
#include <torch/torch.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <iostream>

int main(int argc, char** argv) {
  muster::LiveWorld world;
  const auto mapped_before = mallinfo2().hblks;
  void* const large = std::malloc(64 << 20);
  const bool keeps_memory = mallinfo2().hblks == mapped_before;  // the block is not mapped by itself
  std::free(large);
  muster::Launch launch(argc, argv, world.part());
  return launch.run([&] {
    muster::Live live(launch, "numbers", {.bytes = 1 << 16});
    const auto sample = live.dataset().read(std::array<std::int64_t, 1>{0});
    const auto u = sample["u"][0];  // [columns, rows], the reverse of Fortran's
    const auto expected = 100 * torch::arange(1, 4) + torch::arange(1, u.size(0) + 1).unsqueeze(1);
    std::cout << u << "\n" << sample["nu"] << "\n";
    live.stop_solvers();
    return u.equal(expected.to(torch::kDouble)) && sample["nu"].item<double>() == 0.25 && keeps_memory ? 0 : 1;
  });
}
