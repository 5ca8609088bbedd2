#include "base/file.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "data/sources/source.hpp"
#include "muster/version.hpp"
#include "run/environment.hpp"
#include "run/params.hpp"
#include "storage/tier.hpp"
#include "trainer/fit.hpp"

#include <set>

namespace muster::detail::trainer {
namespace {

Json describe(const run::ResolvedOptions& resolved, const run::RunFolder& run) {
  auto options = resolved.options;
  options.run_config.name = run.name();
  options.run_config.storage_path = run.path().parent_path();
  Json datasets = Json::object();
  if (resolved.is_worker())
    for (const auto& [name, dataset] : options.datasets)
      datasets[name] = {{"samples", data::source_of(dataset)->is_stream() ? Json() : Json(dataset.count())}};
  auto params = run::params_from_options(options);
  params.update({
      {"muster_version", MUSTER_VERSION},
      {"program", resolved.launch.program()},
      {"name", run.name()},
      {"hosts", resolved.world().topology().hosts},
      {"num_ranks", resolved.launch.size()},
      {"world_size", resolved.worker_count},
      {"seed", run::seed_of(resolved.launch.flags(), run.params())},
      {"threads_per_worker", resolved.threads_per_worker},
      {"datasets", datasets},
  });
  return params;
}

}  // namespace

bool begin_run(const run::ResolvedOptions& resolved, run::RunFolder& run) {
  const auto& world = resolved.world();
  const Json params = describe(resolved, run);
  const auto& previous = run.params();
  if (resolved.launch.flags().resume == Resume::automatic && previous.is_object() &&
      previous.value("finished", false) &&
      previous.value("train_loop_config", Json()) == params.at("train_loop_config")) {
    log::info("the run " + run.path().string() + " is finished; choose another --name to train again");
    comm::run_on_root(world, [&] {
      storage::tier_of(run.path())->remove_unfinished();
      run.clear_error();  // a start that was refused may have written error.txt
    });
    return false;
  }
  comm::run_on_root(world, [&] {
    auto with_environment = params;
    with_environment["environment"] = run::environment();
    if (previous != with_environment) run.write_params(std::move(with_environment));
    run.clear_error();
  });

  const auto& nodes = world.topology().node_of_rank;
  const auto used_nodes = std::set<int>(nodes.begin(), nodes.begin() + resolved.worker_count).size();
  if (world.rank() == 0)
    log::info("run " + run.path().string() + ": " + counted(resolved.worker_count, "worker") + " on " +
              counted(used_nodes, "node") + ", " + counted(resolved.threads_per_worker, "thread") + " each");
  return true;
}

}  // namespace muster::detail::trainer
