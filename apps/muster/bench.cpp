// muster bench: adds the command to the command line. The program muster-bench does the work.
#include "bench/options.hpp"
#include "commands.hpp"

#include <unistd.h>
#include <muster/error.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace muster::tool {

void add_bench(CLI::App& app) {
  auto* command = app.add_subcommand("bench", bench::description);
  for (const auto& entry : bench::entries) bench::add_command(*command, entry, {});
}

void become_bench(char** words) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "muster-bench";
  ::execv(program.c_str(), words);
  throw Error(ExitCode::missing_package, "starting " + program.string(), std::strerror(errno),
              "Build its CMake target, muster_bench_tool; where muster is installed, install it again then");
}

}  // namespace muster::tool
