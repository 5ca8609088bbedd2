// The subcommands of `muster`. Each function adds a subcommand, with its options and its action, to the command line.
#pragma once

#include "command_line.hpp"

namespace muster::tool {

void add_run(CLI::App& app);
void add_batch(CLI::App& app);
void add_convert(CLI::App& app);
void add_inspect(CLI::App& app);
void add_ls(CLI::App& app);
void add_report(CLI::App& app);
void add_checkpoint(CLI::App& app);
void add_export(CLI::App& checkpoint);
void add_predict(CLI::App& app);
/// Only for the list of commands and for completion: become_bench() starts the program that carries out `muster bench`.
void add_bench(CLI::App& app);
void add_doctor(CLI::App& app);
void add_init(CLI::App& app);
void add_completion(CLI::App& app);

/// Replaces this process by muster-bench, which is in the same folder. `words`: the command line from "bench" on.
[[noreturn]] void become_bench(char** words);

}  // namespace muster::tool
