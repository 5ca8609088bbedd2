#include "options.hpp"

#include "../command_line.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

namespace muster::bench {
namespace {

/// The number of ranks that hosts such as "n1:2,n2" take: here 3, since a host without a number takes one.
int slots_of(const std::string& hosts) {
  int slots = 0;
  std::istringstream in(hosts);
  for (std::string host; std::getline(in, host, ',');) {
    const auto colon = host.find(':');
    slots += colon == host.npos ? 1 : std::max(1, std::atoi(host.c_str() + colon + 1));
  }
  return slots;
}

}  // namespace

CLI::App* add_command(CLI::App& parent, const Entry& entry, std::function<void(const Options&)> run) {
  constexpr int most = std::numeric_limits<int>::max();
  auto* command = parent.add_subcommand(entry.name, entry.description);
  const auto options = std::make_shared<Options>();
  const CLI::Option* ranks = nullptr;
  if (entry.reads_file) {
    options->ranks = 1;
    command->add_option("file", options->file, "The dataset, FILE.h5[:/group] or STORE.zarr[:/group]")
        ->option_text("FILE")
        ->required();
    command->add_option("--batch", options->batch, "Samples of a batch; 256 unless given")
        ->transform(tool::whole_number(1))
        ->option_text("N");
  } else {
    ranks = command->add_option("-n,--ranks", options->ranks, "Ranks; 2 unless given")
                ->transform(tool::whole_number(1, most))
                ->option_text("N");
    if (entry.has_hosts)
      command->add_option("--hosts", options->hosts, "Where, with how many ranks, for mpirun; this host unless given")
          ->option_text("H1:N,H2:N");
    command->add_flag("--with-peers", options->with_peers, "Also run the peers that are programs of their own");
  }
  command->add_flag("--json", options->json, "Print the rows as JSON");
  command->add_option("--rounds", options->rounds, "Rounds of each case; as many as fit its time unless given")
      ->transform(tool::whole_number(1, most))
      ->option_text("R");
  command->add_option("--case", options->cases, "Only these cases")->option_text("NAME...");
  command->add_flag("--for-starter", options->for_starter)->group("");
  command->add_option("--seconds", options->seconds)->transform(tool::whole_number(1, most))->group("");
  command->add_flag("--progress", options->progress)->group("");
  command->callback([=, run = std::move(run)] {
    options->ranks_given = ranks != nullptr && ranks->count() > 0;
    if (!options->ranks_given && !options->hosts.empty()) options->ranks = slots_of(options->hosts);
    run(*options);
  });
  return command;
}

}  // namespace muster::bench
