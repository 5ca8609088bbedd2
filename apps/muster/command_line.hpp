// What the programs muster and muster-bench share: how their command lines are read, and how their errors are printed.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

namespace muster::tool {

/// Accepts whole numbers within these bounds.
CLI::Validator whole_number(std::uint64_t least, std::uint64_t most = std::numeric_limits<std::int64_t>::max());

/// Reads the command line of a program called `name`. `add` adds the commands; their callbacks do the work. An error is
/// printed in one line. Returns the exit code.
int run_command_line(const std::string& name, const std::string& description, int argc, char** argv,
                     const std::function<void(CLI::App&)>& add);

}  // namespace muster::tool
