// Describes a sweep as text.
#pragma once

#include "muster/sweep.hpp"

#include <cstddef>
#include <string>

namespace muster::detail::sweep {

/// Returns "trial_00003 (lr 0.0012, width 64): done, val_loss 0.031 at report 27".
std::string one_line(const Trial& trial, const std::string& metric);

/// Returns a table: the best `most` trials, then the number of the others, and at the end the line of the best trial.
/// No line is longer than `width`: columns that do not fit are left out, and the line of the best trial is shortened.
std::string table_of(const SweepResult& sweep, std::size_t width = 80, std::size_t most = 20);

}  // namespace muster::detail::sweep
