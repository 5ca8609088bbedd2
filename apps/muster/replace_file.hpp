// Writes the files that the tool makes of text.
#pragma once

#include <filesystem>
#include <string>

namespace muster::tool {

/// Writes `text` to the file, at once: nobody opens half of it, and if it cannot be written what was there stays.
/// Writes through a symbolic link. Throws an Error (ExitCode::retry) if it cannot be written.
void replace_file(const std::filesystem::path& output, const std::string& text);

}  // namespace muster::tool
