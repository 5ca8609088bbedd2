// Writes the text files that the tool makes.
#pragma once

#include <filesystem>
#include <string>

namespace muster::tool {

/// Replaces the file by one with this text, as a whole: no other program sees a part of it, and if it cannot be
/// written, the old file stays. Follows a symbolic link. Throws an Error (ExitCode::retry) if the file cannot be
/// written.
void replace_file(const std::filesystem::path& output, const std::string& text);

}  // namespace muster::tool
