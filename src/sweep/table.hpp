// A sweep as text.
#pragma once

#include "muster/sweep.hpp"

#include <cstddef>
#include <string>

namespace muster::detail::sweep {

/// "trial_00003 (lr 0.0012, width 64): done, val_loss 0.031 at report 27".
std::string one_line(const Trial& trial, const std::string& metric);

/// The best `most` trials first, and then a summary of the others. No line is longer than `width`: settings that do not
/// fit are left out. Ends with the line of the best trial.
std::string table_of(const SweepResult& sweep, std::size_t width = 80, std::size_t most = 20);

}  // namespace muster::detail::sweep
