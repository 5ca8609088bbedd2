// What `muster run` finds where it runs: the launcher, its host's name, variables and input.
#pragma once

#include "muster/supervise.hpp"
#include "supervise/launchers/launchers.hpp"

#include <string>
#include <vector>

namespace muster::detail::supervise {

/// The launcher for a job with these options. Throws an Error (ExitCode::missing_package) if there is none.
Launcher find_launcher(const SuperviseOptions& options);

std::string host_name();

/// The names of all variables MUSTER_… of this process, by which flags are set.
std::vector<std::string> flag_variables();

/// Whether something waits to be read from standard input, where that is a file or a pipe.
bool has_input();

}  // namespace muster::detail::supervise
