// The folder for temporary files.
#pragma once

#include "base/export.hpp"

#include <filesystem>

namespace muster::detail {

/// TMPDIR, or /tmp if that is unset or empty. Throws an Error (ExitCode::usage) if it is no folder.
MUSTER_INTERNAL_API std::filesystem::path temporary_parent();

}  // namespace muster::detail
