// A sweep as text.
#pragma once

#include "muster/sweep.hpp"

#include <cstddef>
#include <string>

namespace muster::detail::sweep {

/// "trial_00003 (lr 0.0012, width 64): done, val_loss 0.031 at report 27".
std::string one_line(const Trial& trial, const std::string& metric);

/// The best `most` trials first, and what became of the others; no line is longer than `width`, for which settings are
/// left out. Ends with the line of the best one.
std::string table_of(const SweepResult& sweep, std::size_t width = 80, std::size_t most = 20);

}  // namespace muster::detail::sweep
