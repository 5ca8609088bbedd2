// What it brings that the ranks of a node decode chunks for each other: the time of the first pass and the memory of
// all ranks, against ranks that keep chunks by themselves, in one run; later passes must not be slower.
//   mpirun -n 2 shared_chunks_speed [MEGABYTES]     decoded; 300 unless given. The file is in the system's cache.
// Ends with 1 if a figure is beyond its bound.
#include "data/sources/share_chunks.hpp"
#include "data/sources/source.hpp"
#include "muster/launch.hpp"
#include "support/folder.hpp"
#include "support/hdf5_fixture.hpp"

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace muster {
namespace {

using Order = std::vector<std::int64_t>;

constexpr hsize_t row_values = 1000, chunk_rows = 64;
constexpr std::size_t batch = 64;
bool is_beyond = false;

void write(const std::string& path, hsize_t rows) {
  std::vector<float> values(rows * row_values);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] =
        std::round(1000 * (std::sin(static_cast<float>(i) / 300) + 1e-4F * static_cast<float>(random() % 100))) / 1000;
  test::H5File(path).dataset("x", {rows, row_values}, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data(),
                             {.chunk = chunk_rows, .deflate = 4});
}

/// The memory of this process in MB, of which it counts what n processes share as 1/n.
double own_megabytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  std::string word;
  while (rollup >> word)
    if (word == "Pss:") {
      double kilobytes = 0;
      rollup >> kilobytes;
      return kilobytes / 1000;
    }
  return 0;
}

/// The time of this process and its threads on their cores; unlike time on the clock, it does not count what other
/// processes take.
double now() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The time that all ranks need for a shuffled pass, in which each reads its own samples. Collective.
double pass(const Communicator& world, const Dataset& dataset, unsigned epoch) {
  Order order(static_cast<std::size_t>(dataset.count()));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::ranges::shuffle(order, std::mt19937(epoch));
  world.barrier();
  const auto begin = now();
  const auto step = batch * static_cast<std::size_t>(world.size());
  for (std::size_t first = 0; first < order.size(); first += step) {
    const auto mine = std::min(order.size(), first + batch * static_cast<std::size_t>(world.rank()));
    const auto count = std::min(batch, order.size() - mine);
    if (count > 0) dataset.read(std::span(order).subspan(mine, count));
  }
  return world.all_reduce(now() - begin);
}

void report(const char* what, double alone, double shared, const char* unit, double bound) {
  const bool beyond = shared > bound * alone;
  is_beyond = is_beyond || beyond;
  std::printf("%-28s alone %8.3f %-3s shared %8.3f %-3s ratio %5.2f (at most %.2f)%s\n", what, alone, unit, shared,
              unit, shared / alone, bound, beyond ? " BEYOND" : "");
}

void measure(const Communicator& world, const std::string& path) {
  constexpr double none = std::numeric_limits<double>::infinity();
  double first[] = {none, none}, later[] = {none, none}, memory[] = {0, 0};
  for (unsigned round = 0; round < 3; ++round) {
    std::optional<Dataset> datasets[2];
    for (const int is_shared : {0, 1}) {
      const auto& dataset = datasets[is_shared].emplace(path);
      const auto source = detail::data::source_of(dataset);
      source->count();
      if (is_shared == 1) detail::data::share_chunks(world, {&source, 1});
      ::malloc_trim(0);  // so that each first pass gets its memory from the kernel
      const auto before = world.all_reduce(own_megabytes());
      first[is_shared] = std::min(first[is_shared], pass(world, dataset, round));
      memory[is_shared] = world.all_reduce(own_megabytes()) - before;
    }
    for (unsigned epoch = 0; epoch < 10; ++epoch)
      for (const int is_shared : {0, 1})
        later[is_shared] = std::min(later[is_shared], pass(world, *datasets[is_shared], 10 + epoch));
  }
  if (world.rank() != 0) return;
  report("first pass, all ranks", first[0], first[1], "s", 0.75);
  report("memory of all ranks", memory[0], memory[1], "MB", 1.3 / world.size());
  report("later passes, all ranks", later[0], later[1], "s", 1.1);
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  const auto megabytes = static_cast<hsize_t>(argc > 1 ? std::atoi(argv[1]) : 300);
  int none = 1;
  muster::Launch launch(none, argv);
  return launch.run([&] {
    const auto& world = launch.communicator();
    std::optional<muster::test::Folder> folder;
    if (world.rank() == 0) muster::write(folder.emplace().file("a.h5"), megabytes * 250'000 / muster::row_values);
    muster::measure(world, world.broadcast(folder ? folder->file("a.h5") : std::string()));
    return muster::is_beyond ? 1 : 0;
  });
}
