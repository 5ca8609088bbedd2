// TensorBoard's view of a run: event files in the run's folder. The x axis is the run's global_step, or, where muster
// counts no steps, the number of the report.
#pragma once

#include "observe/observer.hpp"

#include <filesystem>
#include <memory>

namespace muster::detail::observe {

/// Throws an Error (ExitCode::missing_package) if muster was built without the libraries that event files need.
void require_tensorboard();

/// `config`: the run's settings, shown beside its last metrics; TensorBoard shows those of a run's first start. A file
/// is created at the first event. If it cannot be written, a warning says so, and nothing more is written.
std::unique_ptr<Observer> make_tensorboard(const std::filesystem::path& run, const Json& config);

}  // namespace muster::detail::observe
