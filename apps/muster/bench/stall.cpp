#include "stall.hpp"

#include "base/text.hpp"
#include "rounds.hpp"
#include "training.hpp"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <muster/checkpoint.hpp>

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

namespace muster::bench {
namespace {

/// Returns a state of 420 MB in 160 tensors, the same on all ranks.
std::shared_ptr<torch::nn::Module> any_model() {
  torch::manual_seed(0);
  auto model = std::make_shared<torch::nn::Module>();
  for (int i = 0; i < 160; ++i) model->register_parameter(detail::str("t", i), torch::rand({656'250}));
  return model;
}

std::size_t bytes_of(const torch::nn::Module& model) {
  std::size_t bytes = 0;
  for (const auto& parameter : model.parameters()) bytes += parameter.nbytes();
  return bytes;
}

/// Copies the state once, into memory that is already allocated.
class Memcpy {
 public:
  explicit Memcpy(std::size_t bytes) : from_(bytes, 1), to_(bytes, 2) {}
  void operator()() { std::memcpy(to_.data(), from_.data(), to_.size()); }

 private:
  std::vector<char> from_, to_;
};

/// Makes two reports; the second one waits for the save of the first one. Returns the run's folder.
std::filesystem::path warm_up(Session& session, const std::function<void()>& report) {
  report();
  report();
  return session.get_checkpoint()->path().parent_path();
}

/// Waits until nothing is being written in the background, then removes the checkpoints.
void wait_and_clear(Session& session, const std::filesystem::path& run) {
  const auto& communicator = session.communicator();
  if (communicator.rank() == 0)
    while (list_checkpoints(run).empty()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  communicator.barrier();
  if (communicator.rank() == 0) {
    for (const auto& checkpoint : list_checkpoints(run)) std::filesystem::remove_all(checkpoint.path);
    ::sync();
  }
  communicator.barrier();
}

Timings stall_of_report(Session& session, const Measurement& measurement) {
  const auto model = any_model();
  const auto state = session.state({{"model", model}});
  const auto report = [&] { session.report({}, state); };
  const auto run = warm_up(session, report);
  wait_and_clear(session, run);
  Memcpy copy(bytes_of(*model));
  const auto rest = [&] { wait_and_clear(session, run); };
  return bench::measure(session.communicator(),
                        {{.name = ours, .run = report, .after = rest},
                         {.name = "memcpy", .run = [&] { copy(); }},
                         {.name = twin, .run = report, .after = rest}},
                        measurement);
}

Timings stall_of_fused_step(Session& session, const Measurement& measurement) {
  constexpr int width = 1708, layers = 12;  // 35 million parameters; 420 MB with Adam's state
  torch::nn::Sequential stack;
  for (int layer = 0; layer < layers; ++layer) stack->push_back(torch::nn::Linear(width, width));
  auto net = session.prepare_model(stack);
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 1e-4));
  const auto input = torch::randn({8, width});
  const auto& communicator = session.communicator();
  const auto step = [&] { optimizer.step(); };
  const auto gradients = [&] {
    optimizer.zero_grad();
    net->forward(input).square().mean().backward();
  };
  const auto state = session.state({{"model", net}, {"optimizer", optimizer}});
  const auto report = [&] { session.report({}, state); };
  const auto one = [&] { gradients(), step(); };
  one();
  const auto run = warm_up(session, [&] { report(), one(); });
  wait_and_clear(session, run);
  Memcpy copy(3 * bytes_of(*net));

  const auto stall = [&] {
    const auto step_and_pass = [&] { step(), gradients(); };
    const double alone = timed(communicator, step_and_pass);
    const double reporting = timed(communicator, report);
    wait_and_clear(session, run);
    return reporting + timed(communicator, step_and_pass) - alone;
  };
  gradients();
  Timings timings{.candidates = {ours, "memcpy", twin}, .ms = {{}, {}, {}}};
  for (RoundTimer timer(measurement.rounds); has_next_round(timer, communicator);) {
    measurement.show(timer.text());
    timings.ms[0].push_back(stall());
    timings.ms[1].push_back(timed(communicator, [&] { copy(); }));
    timings.ms[2].push_back(stall());
    measurement.keep(timings);
  }
  return timings;
}

}  // namespace

Timings measure_stall(Launch& launch, bool fused, const Measurement& measurement) {
  Timings timings;
  in_session(launch, "stall",
             [&](Session& session) {
               timings = fused ? stall_of_fused_step(session, measurement) : stall_of_report(session, measurement);
             },
             {.async_save = true});
  return timings;
}

}  // namespace muster::bench
