// The user's folder for temporary files, and the user's home folder.
#pragma once

#include "base/export.hpp"

#include <filesystem>

namespace muster::detail {

/// TMPDIR, or /tmp if that is unset or empty. Throws an Error (ExitCode::usage) if it is no folder.
MUSTER_INTERNAL_API std::filesystem::path temporary_parent();

/// Sets HOME to /nonexistent for a user who has neither HOME nor an entry in passwd, as in a container that is started
/// with another user id, because Open MPI would crash. To be called before threads and other processes are started.
MUSTER_INTERNAL_API void require_home() noexcept;

}  // namespace muster::detail
