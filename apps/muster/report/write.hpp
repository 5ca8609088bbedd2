// Writes the page of `muster report`.
#pragma once

#include <filesystem>
#include <vector>

namespace muster::tool::report {

/// Reads the folders of runs and sweeps, and replaces or creates the file `output`, or writes to stdout
/// if it is "-". Throws an Error: usage if `output`
/// is anything but a report or a new file, data if a folder is neither a run nor a sweep, missing_package if muster was
/// built without what the page needs.
void write_report(const std::vector<std::filesystem::path>& folders, const std::filesystem::path& output);

}  // namespace muster::tool::report
