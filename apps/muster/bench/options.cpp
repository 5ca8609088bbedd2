#include "options.hpp"

#include "../command_line.hpp"

#include <limits>
#include <memory>
#include <utility>

namespace muster::bench {

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
    run(*options);
  });
  return command;
}

}  // namespace muster::bench
