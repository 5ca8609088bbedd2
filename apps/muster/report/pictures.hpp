// The pictures of Session::log_image, from a run's files for TensorBoard.
#pragma once

#include <muster/json.hpp>

#include <filesystem>

namespace muster::tool::report {

/// Returns a few pictures of each name, from the first to the newest: {"name", "step", "png"}, the PNG in base 64. What
/// cannot be read is left out. Empty if the run has no such files.
Json pictures_of(const std::filesystem::path& run);

}  // namespace muster::tool::report
