// params.json: what a run was asked for, and whether it is finished.
#pragma once

#include "muster/config.hpp"

#include <filesystem>

namespace muster::detail::train {

struct Params {
  bool finished = false;
  Json train_loop_config = Json::object();
  Json metadata = Json::object();
  ScalingConfig scaling = {};
  CheckpointConfig checkpoint = {};
  int max_failures = 0;
  TorchConfig torch = {};
  DataConfig data = {};
};

/// Without "finished", which is written when the run is.
Json to_json(const Params& params);
/// An Error (ExitCode::data) names what is missing or cannot be. Keys that are unknown are left alone; those of later
/// versions may be missing.
Params params_from_json(const Json& json, const std::filesystem::path& path);
/// Those of the run in `folder`; there is a params.json.
Params read_params(const std::filesystem::path& folder);

}  // namespace muster::detail::train
