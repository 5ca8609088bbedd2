// JSON: the type of everything that is read, written or reported as JSON.
//
// TrainerOptions and the structs in it convert to and from JSON by to_json and from_json, as in Json(options) and
// json.get<RunConfig>(). A run saves them in this form. The JSON object has a key for each field. Optional fields may
// be null; enumerators are written as their names; durations are whole milliseconds, with _ms appended to the key.
// Fields that are not data (functions, callbacks, datasets) are left out. When reading, a missing key leaves its field
// unchanged; an unknown key or an invalid value is an Error (ExitCode::data) that names it.
#pragma once

#include <muster/detail/export.hpp>

#include <nlohmann/json.hpp>

namespace muster {
namespace detail {

/// Identifies one build of nlohmann/json: its version, JSON_DIAGNOSTICS, and one of its types. The mangled name of that
/// type depends on the library's other macros.
template <int major, int minor, int patch, int diagnostics, class Named>
struct NlohmannJson {};

/// The nlohmann/json that the including source file is compiled with.
using ThisNlohmannJson = NlohmannJson<NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                      NLOHMANN_JSON_VERSION_PATCH, JSON_DIAGNOSTICS, nlohmann::json::value_t>;

/// muster defines this function only for the nlohmann/json that it was built with. So a program that is compiled with
/// another version or other macros does not link: its JSON values may be laid out differently (docs/installing.md).
MUSTER_API void muster_was_built_with(ThisNlohmannJson);
[[gnu::used]] inline constexpr auto* json_is_that_of_muster = &muster_was_built_with;

}  // namespace detail

/// Any JSON value. The settings of a training function are a Config (muster/config.hpp).
using Json = nlohmann::json;

}  // namespace muster
