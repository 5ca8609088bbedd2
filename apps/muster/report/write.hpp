// Writes the page of `muster report`.
#pragma once

#include <filesystem>
#include <vector>

namespace muster::tool::report {

/// Reads the folders of runs and sweeps, and writes a page to the file `output`, or to stdout if that is "-". Throws an
/// Error: usage if `output` is neither an older report nor a new file, data if a folder is neither a run nor a sweep,
/// missing_package if muster was built without a library that the page needs.
void write_report(const std::vector<std::filesystem::path>& folders, const std::filesystem::path& output);

}  // namespace muster::tool::report
