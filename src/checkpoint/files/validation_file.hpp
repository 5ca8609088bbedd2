// validation.json, beside the manifest: what was measured of a checkpoint after it was committed. The metrics in the
// manifest say that this was asked for, {"checkpoint_status": "pending_validation", …}, and stay as they are.
//
//   {"checkpoint_status": "validated", "val_accuracy": 0.91, …}
//
// Its fields take the place of those of the report, here and in the report's row.
#pragma once

#include "muster/checkpoint.hpp"
#include "muster/json.hpp"

#include <filesystem>
#include <optional>

namespace muster::detail::checkpoint {

inline constexpr const char* validation_name = "validation.json";
inline constexpr const char* status_name = "checkpoint_status";

/// As a row has it.
const char* text_of(CheckpointStatus status) noexcept;
/// What the fields of a report say; committed where they say nothing.
CheckpointStatus status_in(const Json& fields);

/// The fields of the file; none where it is not there, or is damaged.
std::optional<Json> read_validation(const std::filesystem::path& checkpoint);
/// Replaces the file, durably.
void write_validation(const std::filesystem::path& checkpoint, const Json& fields);

/// The metrics of a checkpoint's report, and over them what its validation has found, if it was asked for.
Json measured(const std::filesystem::path& checkpoint, Json metrics);

}  // namespace muster::detail::checkpoint
