// mpirun -n 2 ./consumer
#include <muster/launch.hpp>

#include <iostream>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto& world = launch.communicator();
    const auto ranks = world.all_gather("rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()));
    if (world.rank() == 0)
      for (const auto& rank : ranks) std::cout << rank << "\n";
  });
}
