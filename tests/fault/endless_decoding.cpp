// Ranks that decode chunks for each other, until one is killed. Each prints its process id when it has begun.
#include "data/sources/node_chunks.hpp"
#include "data/sources/share_chunks.hpp"
#include "data/sources/source.hpp"
#include "muster/convert.hpp"
#include "muster/launch.hpp"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <vector>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto& world = launch.communicator();
    const auto path = std::filesystem::temp_directory_path() / "decoded.h5";
    std::vector<std::int64_t> all(100'000);
    std::iota(all.begin(), all.end(), 0);
    if (world.rank() == 0) {
      auto table = path;
      std::ofstream csv(table.replace_extension(".csv"));
      csv << "x,y\n";
      for (const auto i : all) csv << i % 97 << ',' << i << '\n';
      csv.close();
      muster::convert_csv({table}, path, {.chunk = 1000, .compress = 6});
    }
    world.barrier();
    // Segments of some datasets are made before, since a process that is killed while it makes one leaves a name.
    std::vector<std::shared_ptr<muster::detail::data::Source>> sources;
    for (int i = 0; i < 100; ++i) sources.push_back(muster::detail::data::source_of(muster::Dataset(path)));
    muster::detail::data::share_chunks(world, sources);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (sources[i]->node_chunks()->slots() == nullptr) return 1;
      sources[i]->read(all);
      if (i != 2) continue;
      std::printf("pid %d\n", static_cast<int>(::getpid()));
      std::fflush(stdout);
    }
    for (;;) world.barrier();
    return 0;
  });
}
