// CheckpointConfig as JSON.
#include "muster/config.hpp"

#include "base/option_json.hpp"

namespace muster {

template <>
struct detail::option_json::EnumNames<ScoreOrder> {
  static constexpr std::array names{"max", "min"};
};
template <>
struct detail::option_json::EnumNames<WhenBusy> {
  static constexpr std::array names{"wait", "drop"};
};

MUSTER_OPTIONS(CheckpointConfig, num_to_keep, checkpoint_score_attribute, checkpoint_score_order, async_save, when_busy,
               fast_tier)

}  // namespace muster
