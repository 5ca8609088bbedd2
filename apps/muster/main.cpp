// muster: the command line tool. Results go to stdout, everything else to stderr.
#include "commands.hpp"

#include <signal.h>

#include <string>

namespace muster::tool {
namespace {

void add_commands(CLI::App& app) {
  app.footer("Example:\n  muster convert idx images.gz labels.gz train.h5\n  muster inspect train.h5");
  add_run(app);
  add_batch(app);
  add_convert(app);
  add_inspect(app);
  add_ls(app);
  add_report(app);
  add_checkpoint(app);
  add_predict(app);
  add_bench(app);
  add_doctor(app);
  add_init(app);
  add_completion(app);
}

}  // namespace
}  // namespace muster::tool

int main(int argc, char** argv) {
  using namespace muster::tool;
  ::signal(SIGXFSZ, SIG_IGN);  // makes a write beyond a limit on file sizes fail, so that the file can be removed
  return run_command_line("muster", "Trains neural networks on clusters: its data, its runs and their checkpoints.",
                          argc, argv, [&](CLI::App& app) {
                            if (argc > 1 && std::string(argv[1]) == "bench") become_bench(argv + 1);
                            add_commands(app);
                          });
}
