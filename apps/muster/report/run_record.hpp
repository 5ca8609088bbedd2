// Reads from the folders of a run and a sweep what a page shows of them.
#pragma once

#include "run_rows.hpp"

#include <muster/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool::report {

Json read_run(const std::filesystem::path& run, const std::string& name, const Budget& budget);

/// Returns the table of a sweep.
Json read_sweep(const std::filesystem::path& sweep, const std::string& name);
/// Returns the folders of the trials that have begun, in order. Throws an Error if the sweep's folder cannot be read.
std::vector<std::filesystem::path> trials_of(const std::filesystem::path& sweep);

}  // namespace muster::tool::report
