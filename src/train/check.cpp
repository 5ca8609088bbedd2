#include "base/log.hpp"
#include "comm/on_ranks.hpp"
#include "comm/world.hpp"
#include "data/sources/source.hpp"
#include "train/device.hpp"
#include "train/fit.hpp"
#include "train/same_data.hpp"
#include "watch/record.hpp"

namespace muster::detail::train {

at::Device check_together(const Plan& plan) {
  const watch::During compare("comparing the data");
  const auto& datasets = plan.options.datasets;
  at::Device device = at::kCPU;
  std::map<std::string, data::Fingerprint> prints;
  const bool all_need_data = static_cast<bool>(plan.options.validation.function);
  const bool needs_data = plan.works() || all_need_data;
  comm::check_on_all(plan.world(), {.done = plan.wait_limit, .failed = comm::final_grace(plan.world())}, [&] {
    if (!needs_data) return;
    device = choose_device(plan.options.scaling_config.use_gpu, plan.launch);
    for (const auto& [name, dataset] : datasets) prints[name] = data::source_of(dataset)->fingerprint();
  });
  require_same_data(plan.world(), all_need_data ? plan.world().size() : plan.workers, prints);
  for (const auto& name : plan.options.dataset_config.datasets_to_split.names())
    if (name != "train" && !datasets.contains(name))  // "train" is in the default, even without such a dataset
      log::warn("datasets_to_split names \"" + name + "\", and the trainer was given no such dataset");
  return device;
}

}  // namespace muster::detail::train
