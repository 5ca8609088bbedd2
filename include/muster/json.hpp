// JSON, as everything that is read, written or reported as such.
#pragma once

#include <nlohmann/json.hpp>

namespace muster {

/// Any JSON. What a training function is set by is a Config (muster/config.hpp).
using Json = nlohmann::json;

}  // namespace muster
