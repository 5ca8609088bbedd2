// Writes TensorBoard's event files in the run's folder. The x axis is global_step; if muster counts no steps, it is the
// number of the report.
#pragma once

#include "observe/observer.hpp"

#include <filesystem>
#include <memory>

namespace muster::detail::observe {

/// Throws an Error (ExitCode::missing_package) if muster was built without the libraries for event files.
void require_tensorboard();

/// `config`: the run's settings, which TensorBoard shows beside the last metrics; it shows the settings of the run's
/// first start. Each start creates a file at its first event. If the file cannot be written, logs a warning and writes
/// nothing more.
std::unique_ptr<Observer> make_tensorboard(const std::filesystem::path& run, const Json& config);

}  // namespace muster::detail::observe
