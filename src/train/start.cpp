#include "base/file.hpp"
#include "base/listed.hpp"
#include "base/log.hpp"
#include "checkpoint/tier.hpp"
#include "comm/on_ranks.hpp"
#include "data/sources/source.hpp"
#include "muster/version.hpp"
#include "train/fit.hpp"
#include "train/params.hpp"

#include <set>

namespace muster::detail::train {
namespace {

Json describe(const Plan& plan, const RunFolder& run) {
  auto options = plan.options;
  options.run_config.name = run.name();
  options.run_config.storage_path = run.path().parent_path();
  Json datasets = Json::object();
  if (plan.works())
    for (const auto& [name, dataset] : options.datasets)
      datasets[name] = {{"samples", data::source_of(dataset)->is_stream() ? Json() : Json(dataset.count())}};
  auto params = params_of(options);
  params.update({
      {"muster_version", MUSTER_VERSION},
      {"program", plan.launch.program()},
      {"name", run.name()},
      {"hosts", plan.world().topology().hosts},
      {"num_ranks", plan.launch.size()},
      {"world_size", plan.workers},
      {"seed", plan.launch.flags().seed},
      {"threads_per_worker", plan.threads},
      {"datasets", datasets},
  });
  return params;
}

}  // namespace

bool start(const Plan& plan, RunFolder& run) {
  const auto& world = plan.world();
  const Json params = describe(plan, run);
  const auto& previous = run.params();
  if (plan.launch.flags().resume == Resume::automatic && previous.is_object() && previous.value("finished", false) &&
      previous.value("train_loop_config", Json()) == params.at("train_loop_config")) {
    log::info("the run " + run.path().string() + " is finished; choose another --name to train again");
    comm::on_root(world, [&] { checkpoint::Tier(run.path()).remove_unfinished(); });
    return false;
  }
  comm::on_root(world, [&] {
    if (previous != params) run.write_params(params);
    run.clear_error();
  });

  const auto& nodes = world.topology().node_of_rank;
  const auto used_nodes = std::set<int>(nodes.begin(), nodes.begin() + plan.workers).size();
  if (world.rank() == 0)
    log::info("run " + run.path().string() + ": " + counted(plan.workers, "worker") + " on " +
              counted(used_nodes, "node") + ", " + counted(plan.threads, "thread") + " each");
  return true;
}

}  // namespace muster::detail::train
