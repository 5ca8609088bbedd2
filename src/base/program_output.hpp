// The output of another program, such as one of a batch system.
#pragma once

#include "base/export.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail {

/// Runs a program, searched in PATH; returns what it has written to standard output. None if there is no such program,
/// if it fails, or if it has not ended its output within `limit`: it is killed then.
MUSTER_INTERNAL_API std::optional<std::string> output_of(std::vector<std::string> words,
                                                         std::chrono::milliseconds limit);

}  // namespace muster::detail
