// validation.json, beside the manifest: the results of a validation that was done after the checkpoint was committed.
// The metrics in the manifest only say that it was requested, {"checkpoint_status": "pending_validation", …}, and do
// not change.
//
//   {"checkpoint_status": "validated", "val_accuracy": 0.91, …}
//
// Its fields replace the report's fields of the same name, in the checkpoint's metrics and in the report's row of the
// history.
#pragma once

#include "muster/checkpoint.hpp"
#include "muster/json.hpp"

#include <filesystem>
#include <optional>

namespace muster::detail::checkpoint {

inline constexpr const char* validation_name = "validation.json";
inline constexpr const char* status_name = "checkpoint_status";

/// Returns the name that checkpoints and rows of the history use for the status.
const char* text_of(CheckpointStatus status) noexcept;
/// Returns the status in the fields of a report; `committed` if they have none, or a name that is not known.
CheckpointStatus status_from(const Json& fields);

/// Returns the fields of the file; none if it is missing, damaged, or does not say that the validation has ended.
/// Throws an Error if the file cannot be read.
std::optional<Json> read_validation(const std::filesystem::path& checkpoint);
/// Writes or replaces the file, durably.
void write_validation(const std::filesystem::path& checkpoint, const Json& fields);

/// Returns `metrics`, the metrics of a checkpoint's report, updated with the results of its validation if that was
/// requested and has finished.
Json with_validation(const std::filesystem::path& checkpoint, Json metrics);

}  // namespace muster::detail::checkpoint
