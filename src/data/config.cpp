// DataConfig as JSON.
#include "muster/config.hpp"

#include "base/option_json.hpp"

namespace muster {

static void to_json(Json& json, const DatasetNames& datasets) {
  json = datasets.given() ? Json(datasets.names()) : Json();
}

static void from_json(const Json& json, DatasetNames& datasets) {
  if (json.is_null()) {
    datasets = DatasetNames::not_given();
    return;
  }
  std::vector<std::string> names;
  detail::option_json::from(json, names);
  datasets = std::move(names);
}

MUSTER_OPTIONS(DataConfig, datasets_to_split, split_all)

}  // namespace muster
