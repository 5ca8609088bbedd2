// JSON: the type of everything that is read, written or reported as JSON.
//
// What a run is saved with, TrainerOptions and the structs in it, converts to and from JSON by to_json and from_json:
// Json(options), json.get<RunConfig>(). The JSON object has a key for each field. Optional fields may be null;
// enumerators are written as their names; durations are whole milliseconds, with _ms appended to the key. Fields that
// are not data (functions, callbacks, datasets) are left out. When reading, a missing key leaves its field unchanged;
// an unknown key or an invalid value is an Error (ExitCode::data) that names it.
#pragma once

#include <nlohmann/json.hpp>

namespace muster {

/// Any JSON value. The settings of a training function are a Config (muster/config.hpp).
using Json = nlohmann::json;

}  // namespace muster
