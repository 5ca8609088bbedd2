// The pictures of Session::log_image, from a run's files for TensorBoard.
#pragma once

#include <muster/json.hpp>

#include <filesystem>

namespace muster::tool::report {

/// Returns the first and the newest pictures of each name: {"name", "step", "png"}, the PNG in base 64. Large pictures,
/// and what cannot be read, are left out. Empty if the run has no such files.
Json pictures_of(const std::filesystem::path& run);

}  // namespace muster::tool::report
