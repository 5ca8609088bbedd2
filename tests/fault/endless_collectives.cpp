// All-reduces of all sizes without end, until it is killed. Each rank prints its process id when it has begun.
#include "muster/launch.hpp"

#include <unistd.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto& world = launch.communicator();
    const auto shared = world.shared_memory(std::size_t{8} << 20);
    for (std::size_t round = 0;; ++round) {
      for (const std::size_t count : {1, 1'000, 50'000, 2'000'000}) {
        std::vector<float> own(count, 1.0f);
        world.all_reduce(own);
        world.all_reduce(shared.as<float>().first(count));
      }
      if (round == 3) {
        std::printf("pid %d\n", static_cast<int>(::getpid()));
        std::fflush(stdout);
      }
    }
    return 0;
  });
}
