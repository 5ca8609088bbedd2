// JSON, as everything that is read, written or reported as such.
//
// Structs of options are JSON too, by to_json and from_json beside each: Json(options), json.get<BatchOptions>(). An
// object has a key for each field. What is optional may be null; enumerators go by their names, types of tensors by
// torch's ("float32"), devices as "cuda:0"; durations are whole milliseconds, with _ms behind the key. What is not data
// (functions, callbacks, datasets) is left out. When read, a missing key leaves its field as it is; a key that is
// unknown or a value that cannot be is an Error (ExitCode::data) that names it.
#pragma once

#include <nlohmann/json.hpp>

namespace muster {

/// Any JSON. What a training function is set by is a Config (muster/config.hpp).
using Json = nlohmann::json;

}  // namespace muster
