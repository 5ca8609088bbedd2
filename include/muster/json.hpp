// JSON: the type of everything that is read, written or reported as JSON.
//
// Option structs convert to and from JSON by to_json and from_json: Json(options), json.get<BatchOptions>(). The JSON
// object has a key for each field. Optional fields may be null; enumerators are written as their names, tensor types as
// torch's ("float32"), devices as "cuda:0"; durations are whole milliseconds, with _ms appended to the key. Fields that
// are not data (functions, callbacks, datasets) are left out. When reading, a missing key leaves its field unchanged;
// an unknown key or an invalid value is an Error (ExitCode::data) that names it.
#pragma once

#include <nlohmann/json.hpp>

namespace muster {

/// Any JSON value. The settings of a training function are a Config (muster/config.hpp).
using Json = nlohmann::json;

}  // namespace muster
