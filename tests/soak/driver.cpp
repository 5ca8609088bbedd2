#include "soak/driver.hpp"

#include "comm/make_world.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/timeout.hpp"
#include "support/folder.hpp"

#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string_view>

namespace muster::soak {
namespace {

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

char did_not_end[256];  ///< printed when a program does not end

void end_by_alarm(int) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, did_not_end, std::string_view(did_not_end).size());
  ::_exit(1);
}

struct Selection {
  std::uint64_t first = 1;
  int count = 100;
  bool aloud = false;
};

Selection choose(int argc, char** argv) {
  Selection selection;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    const auto value = std::strtoull(argv[i + 1], nullptr, 10);
    if (flag == "--first") selection.first = value;
    if (flag == "--count") selection.count = static_cast<int>(value);
    if (flag == "--seed") selection = {value, 1, true};
  }
  return selection;
}

}  // namespace

Communicator on_nodes(const Communicator& world, const std::function<int(int)>& node_of) {
  detail::comm::Placement placement;
  for (int r = 0; r < world.size(); ++r) {
    placement.node_of_rank.push_back(node_of(r));
    placement.hosts.push_back(std::to_string(node_of(r)));
  }
  return detail::comm::make_world(world, std::move(placement));
}

int drive(int argc, char** argv, const std::string& name, const std::function<Play(const Communicator& world)>& begin) {
  const auto selection = choose(argc, argv);
  const detail::comm::MpiScope environment;
  const auto& world = environment.world();
  const bool first_rank = world.rank() == 0;
  detail::comm::set_timeout(world, patience);
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  ::signal(SIGALRM, end_by_alarm);
  const auto play = begin(world);
  int wrong = 0;
  for (int i = 0; i < selection.count; ++i) {
    const auto seed = selection.first + static_cast<std::uint64_t>(i);
    const auto again = "mpirun -n " + std::to_string(world.size()) + ' ' + name + " --seed " + std::to_string(seed);
    std::snprintf(did_not_end, sizeof did_not_end, "did not end: %s\n", again.c_str());
    ::alarm(static_cast<unsigned>(2 * patience.count()));
    std::optional<test::Folder> folder;
    if (first_rank) folder.emplace();
    std::string found;
    try {
      found = play({seed, world.broadcast(folder ? folder->path().string() : ""), selection.aloud});
    } catch (const std::exception& error) {
      std::fprintf(stderr, "ended by an error on rank %d (%s): %s\n", world.rank(), error.what(), again.c_str());
      detail::comm::abort(1);
    }
    const auto of_ranks = world.all_gather(found);
    const auto bad = std::ranges::find_if(of_ranks, [](const auto& of_rank) { return !of_rank.empty(); });
    if (bad == of_ranks.end()) continue;
    ++wrong;
    if (first_rank)
      std::fprintf(stderr, "wrong on rank %td (%s): %s\n", bad - of_ranks.begin(), bad->c_str(), again.c_str());
  }
  ::alarm(0);
  if (first_rank)
    std::printf("%d programs of %s on %d ranks from seed %llu on, %d wrong\n", selection.count, name.c_str(),
                world.size(), static_cast<unsigned long long>(selection.first), wrong);
  return wrong > 0 ? 1 : 0;
}

}  // namespace muster::soak
