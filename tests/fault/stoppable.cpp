// A run that waits, in the phase that --set phase=… names, until every rank has been asked to stop: in a step, a save,
// a validation or a load. It says when it is there.
#include "muster/launch.hpp"
#include "muster/trainer.hpp"

#include <ATen/ops/arange.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace {

struct Phases {
  const muster::Launch& launch;
  std::string wanted;

  void in(const char* phase) const {
    if (phase != wanted) return;
    std::printf("in %s\n", phase);
    std::fflush(stdout);
    while (!launch.stop_requested()) {
    }
  }
};

void train(muster::Session& session, const Phases& phases) {
  std::int64_t batches = 0;
  const muster::StateEntry slow(
      [&] {
        phases.in("save");
        return muster::StateDict{.values = 1};
      },
      [&](const muster::StateDict&) { phases.in("load"); });
  auto state = session.state({{"batches", batches}, {"slow", slow}});
  state.restore();
  std::printf("begins at %lld\n", static_cast<long long>(batches));
  std::fflush(stdout);
  for (auto epoch : session.epochs(1'000'000'000)) {
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 10})) {
      ++batches;
      phases.in("step");
    }
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard("test").iter_torch_batches({.batch_size = 10}))
      phases.in("validation");
    if (epoch == 0) session.report({{"batches", batches}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    const auto data = muster::Dataset::from_tensors({{"x", at::arange(100)}});
    return muster::TorchTrainer(launch,
                                [&](muster::Session& session, const muster::Config& config) {
                                  train(session, {launch, config.at("phase")});
                                },
                                {.train_loop_config = {{"phase", ""}}, .datasets = {{"train", data}, {"test", data}}})
        .fit();
  });
}
