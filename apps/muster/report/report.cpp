// muster report: writes a page about runs and sweeps.
#include "../commands.hpp"
#include "write.hpp"

#include <filesystem>
#include <memory>
#include <vector>

namespace muster::tool {

void add_report(CLI::App& app) {
  struct Arguments {
    std::vector<std::filesystem::path> runs;
    std::filesystem::path output = "report.html";
  };
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("report", "Write a page that shows runs and compares them; it opens offline");
  command->add_option("runs", arguments->runs, "Folders of runs or of sweeps")->option_text("RUN...")->required();
  command->add_option("-o,--output", arguments->output, "The page; - for standard output [report.html]")
      ->option_text("FILE.html");
  command->footer("Example:\n  muster report runs/demo\n  muster report runs/first runs/second -o compared.html");
  command->callback([arguments] { report::write_report(arguments->runs, arguments->output); });
}

}  // namespace muster::tool
