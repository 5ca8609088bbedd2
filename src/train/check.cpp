#include "base/log.hpp"
#include "comm/on_ranks.hpp"
#include "data/sources/fingerprint.hpp"
#include "data/sources/source.hpp"
#include "train/fit.hpp"
#include "watch/record.hpp"

#include <ATen/detail/CUDAHooksInterface.h>

namespace muster::detail::train {
namespace {

at::Device choose_device(const Plan& plan) {
  if (!plan.options.scaling_config.use_gpu) return at::kCPU;
  const auto& topology = plan.world().topology();
  const int gpus = at::detail::getCUDAHooks().deviceCount();
  if (gpus < 1)
    throw Error(ExitCode::data, "choosing the device",
                "use_gpu is set and host " + topology.hosts[static_cast<std::size_t>(plan.world().rank())] +
                    " has no GPU that this libtorch can use",
                "Set use_gpu to false, or run where there is a GPU with a CUDA build of libtorch");
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(plan.launch.place_on_node() % gpus));
}

}  // namespace

void require_same_data(const Communicator& world, int workers, const std::map<std::string, data::Fingerprint>& mine) {
  Json prints = Json::object();
  for (const auto& [name, print] : mine) prints[name] = print.to_json();
  const auto of_rank = world.all_gather(prints.dump(-1, ' ', false, Json::error_handler_t::replace));
  const auto where = [&](std::size_t rank) {
    return "rank " + std::to_string(rank) + " (" + world.topology().hosts[rank] + ")";
  };
  const auto refuse = [](const std::string& name, const std::string& fact) {
    throw Error(ExitCode::data, "comparing the dataset \"" + name + "\" over the ranks", fact,
                "Copy the same files to every host, or make the same tensors on every rank");
  };
  const auto first = Json::parse(of_rank.front());
  for (std::size_t rank = 1; rank < static_cast<std::size_t>(workers); ++rank) {
    if (of_rank[rank] == of_rank.front()) continue;
    const auto other = Json::parse(of_rank[rank]);
    for (const auto& [name, print] : first.items()) {
      if (!other.contains(name)) refuse(name, where(rank) + " has none of that name, and " + where(0) + " has");
      if (const auto fact = data::difference(data::Fingerprint::from_json(print), where(0),
                                             data::Fingerprint::from_json(other.at(name)), where(rank)))
        refuse(name, *fact);
    }
    for (const auto& [name, print] : other.items())
      if (!first.contains(name)) refuse(name, where(0) + " has none of that name, and " + where(rank) + " has");
  }
}

at::Device check_together(const Plan& plan) {
  const watch::During compare("comparing the data");
  const auto& datasets = plan.options.datasets;
  at::Device device = at::kCPU;
  std::map<std::string, data::Fingerprint> prints;
  comm::check_on_all(plan.world(), {.done = plan.wait_limit, .failed = comm::final_grace}, [&] {
    if (!plan.works()) return;
    device = choose_device(plan);
    for (const auto& [name, dataset] : datasets) prints[name] = dataset.source()->fingerprint();
  });
  require_same_data(plan.world(), plan.workers, prints);
  for (const auto& name : plan.options.dataset_config.datasets_to_split.names())
    if (name != "train" && !datasets.contains(name))  // the default names "train" whether there is one or not
      log::warn("datasets_to_split names \"" + name + "\", and the trainer was given no such dataset");
  return device;
}

}  // namespace muster::detail::train
