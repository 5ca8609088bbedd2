// What the programs muster and muster-bench share: they read their command lines and print their errors in the same
// way.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

namespace muster::tool {

/// Accepts whole numbers from `least` to `most`.
CLI::Validator whole_number(std::uint64_t least, std::uint64_t most = std::numeric_limits<std::int64_t>::max());

/// Reads the command line of a program called `name` and returns the exit code. `add` adds the commands; their
/// callbacks do the work. An error is printed to stderr.
int run_command_line(const std::string& name, const std::string& description, int argc, char** argv,
                     const std::function<void(CLI::App&)>& add);

}  // namespace muster::tool
