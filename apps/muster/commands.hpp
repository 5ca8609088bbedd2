// The subcommands of `muster`. Each function adds a subcommand, with its options and its action, to the command line.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <limits>

namespace muster::tool {

/// Accepts whole numbers within these bounds.
CLI::Validator whole_number(std::uint64_t least, std::uint64_t most = std::numeric_limits<std::int64_t>::max());

void add_run(CLI::App& app);
void add_batch(CLI::App& app);
void add_convert(CLI::App& app);
void add_inspect(CLI::App& app);
void add_ls(CLI::App& app);
void add_report(CLI::App& app);
void add_checkpoint(CLI::App& app);
void add_export(CLI::App& checkpoint);
void add_bench(CLI::App& app);
void add_doctor(CLI::App& app);
void add_init(CLI::App& app);
void add_completion(CLI::App& app);

}  // namespace muster::tool
