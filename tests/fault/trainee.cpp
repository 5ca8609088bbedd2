// A small run that harms itself as its settings say, for the scripts in this folder.
#include "muster/launch.hpp"
#include "muster/trainer.hpp"

#include <ATen/ops/arange.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <optional>

namespace {

/// Counts batches, without a model, for as long as it may.
void count(muster::Session& session, bool has_state) {
  std::int64_t batches = 0;
  std::optional<muster::State> state;
  if (has_state) {
    state = session.state({{"batches", batches}});
    state->restore();
  }
  const auto first = batches;
  for ([[maybe_unused]] auto epoch : session.epochs(1'000'000'000))
    for ([[maybe_unused]] auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 10}))
      if (batches++ == first) {
        std::printf("under way from %lld\n", static_cast<long long>(first));
        std::fflush(stdout);
      }
}

void train(muster::Session& session, const muster::Config& config) {
  if (config.at("stuck") == session.world_rank())
    for (;;) ::pause();
  session.barrier();
  if (config.at("counts")) count(session, config.at("has_state"));
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    return muster::TorchTrainer(launch, train,
                                {.train_loop_config = {{"stuck", -1}, {"counts", false}, {"has_state", true}},
                                 .run_config = {.failure_config = {.max_failures = 1}},
                                 .datasets = {{"train", muster::Dataset::from_tensors({{"x", at::arange(1000)}})}}})
        .fit();
  });
}
