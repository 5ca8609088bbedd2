// A small run that does to itself what its settings say; the scripts beside it do the rest.
#include "muster/launch.hpp"
#include "muster/trainer.hpp"

#include <unistd.h>

namespace {

void train(muster::Session& session, const muster::Config& config) {
  if (config.at("stuck") == session.world_rank())
    for (;;) ::pause();
  session.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    return muster::TorchTrainer(
               launch, train,
               {.train_loop_config = {{"stuck", -1}}, .run_config = {.failure_config = {.max_failures = 1}}})
        .fit();
  });
}
