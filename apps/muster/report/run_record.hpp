// What a page shows of a run and of a sweep, read from their folders.
#pragma once

#include "run_rows.hpp"

#include <muster/json.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace muster::tool::report {

Json read_run(const std::filesystem::path& run, const std::string& name, const Budget& budget);

/// The table of a sweep.
Json read_sweep(const std::filesystem::path& sweep, const std::string& name);
/// The folders of its trials that have begun, in their order.
std::vector<std::filesystem::path> trials_of(const std::filesystem::path& sweep);

}  // namespace muster::tool::report
