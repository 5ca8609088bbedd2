// What `muster run` finds where it runs: its host's name, variables and input.
#pragma once

#include <string>
#include <vector>

namespace muster::detail::supervise {

std::string host_name();

/// The names of all variables MUSTER_… of this process, by which flags are set.
std::vector<std::string> flag_variables();

/// Whether something waits to be read from standard input, where that is a file or a pipe.
bool has_input();

}  // namespace muster::detail::supervise
