#include "base/log.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "data/sources/share_chunks.hpp"
#include "data/sources/source.hpp"
#include "run/device.hpp"
#include "run/same_data.hpp"
#include "trainer/fit.hpp"
#include "watch/record.hpp"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::trainer {

at::Device check_device_and_data(const run::ResolvedOptions& resolved) {
  const watch::ScopedCallName compare("comparing the data");
  const auto& datasets = resolved.options.datasets;
  at::Device device = at::kCPU;
  std::map<std::string, data::DatasetFingerprint> prints;
  std::vector<std::shared_ptr<data::Source>> sources;
  const bool all_need_data = static_cast<bool>(resolved.options.validation.function);
  const bool needs_data = resolved.is_worker() || all_need_data;
  comm::check_on_all(resolved.world(), {.done = resolved.timeout, .failed = comm::final_grace(resolved.world())}, [&] {
    if (!needs_data) return;
    device = run::choose_device(resolved.options.scaling_config.use_gpu, resolved.launch);
    for (const auto& [name, dataset] : datasets) {
      sources.push_back(data::source_of(dataset));
      prints[name] = sources.back()->fingerprint();
    }
  });
  if (resolved.options.scaling_config.use_gpu) run::warn_of_shared_gpus(resolved.launch);
  run::require_same_data(resolved.world(), all_need_data ? resolved.world().size() : resolved.worker_count, prints);
  data::share_chunks(resolved.world(), sources);
  for (const auto& name : resolved.options.dataset_config.datasets_to_split.names())
    if (name != "train" && !datasets.contains(name))  // the default contains "train", even if there is no such dataset
      log::warn("datasets_to_split names \"" + name + "\", and the trainer was given no such dataset");
  return device;
}

}  // namespace muster::detail::trainer
