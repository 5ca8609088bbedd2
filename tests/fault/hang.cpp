// A small run in which one rank misbehaves at one place as its settings say, for the script of that name.
#include "muster/launch.hpp"
#include "muster/trainer.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <signal.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;

constexpr auto busy = 4s;  // longer than the script's limit
std::atomic<bool> reader_waits{false};

/// The rank, the place and the fault are those of the settings.
class Fault {
 public:
  Fault(muster::Session& session, const muster::Config& config)
      : session_(session),
        here_(config.at("rank") == session.world_rank()),
        all_(config.at("rank") == -1),
        fault_(config.at("fault")),
        at_(config.at("at")) {}

  /// True if the rank should return now.
  bool at(const std::string& place) {
    if (place != at_ || (!here_ && !all_)) return false;
    at_.clear();  // once
    std::printf("now %.3f\n",
                std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
    std::fflush(stdout);
    if (fault_ == "sleep") stand_still();
    if (fault_ == "spin")
      for (volatile bool forever = true; forever;) {
      }
    if (fault_ == "stop") ::raise(SIGSTOP);
    if (fault_ == "announced") session_.keep_alive(2 * busy);
    if (fault_ == "announced" || fault_ == "work") std::this_thread::sleep_for(busy);
    if (fault_ == "throw") throw std::runtime_error("this is the user's own");
    if (fault_ == "reader" || fault_ == "reader_throw")
      for ([[maybe_unused]] auto& batch : session_.get_dataset_shard("blocked").iter_batches({.batch_size = 2})) {
        reader_waits.wait(false);
        if (fault_ == "reader") break;
        throw std::runtime_error("this is the user's own");
      }
    if (fault_ == "extra") {
      std::vector<float> values(1024);
      session_.communicator().all_reduce(values);
    }
    return fault_ == "return";
  }
  /// A barrier, where the faulty rank may be in another call.
  void meet() {
    std::vector<float> values(1024);
    if (here_ && fault_ == "mismatch")
      session_.communicator().all_reduce(values);
    else if (here_ && fault_ == "report")
      session_.report({{"alone", 1.0}});
    else
      session_.barrier();
  }

 private:
  [[gnu::noinline]] static void stand_still() {
    for (;;) std::this_thread::sleep_for(1h);
  }

  muster::Session& session_;
  bool here_, all_;
  std::string fault_, at_;
};

/// Gives three rows, then blocks for ever.
muster::Dataset blocked() {
  return muster::Dataset::from_stream([](const muster::StreamShard&) {
    return [rows = 0]() mutable -> std::optional<muster::Json> {
      if (rows == 3) {
        reader_waits = true;
        reader_waits.notify_all();
        std::this_thread::sleep_for(24h);
      }
      return muster::Json{{"i", rows++}};
    };
  });
}

void train(muster::Session& session, const muster::Config& config) {
  Fault fault(session, config);
  if (fault.at("setup")) return;
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  torch::optim::SGD optimizer(net->parameters(), 0.01);
  auto state = session.state({{"model", net},
                              {"own",
                               {[&] {
                                  fault.at("save");
                                  return muster::StateDict{};
                                },
                                [&](const muster::StateDict&) { fault.at("load"); }}}});
  state.restore();
  fault.meet();
  for (auto epoch : session.epochs(config.at("epochs"))) {
    int step = 0;
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 10})) {
      if (++step == 5 && fault.at("train")) return;
      optimizer.zero_grad();
      at::mse_loss(net->forward(batch["x"]), batch["x"]).backward();
      optimizer.step();
    }
    if (fault.at("validate")) return;
    session.report({{"epoch", static_cast<double>(epoch)}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    return muster::TorchTrainer(
               launch, train,
               {.train_loop_config = {{"rank", 1}, {"fault", "none"}, {"at", "nowhere"}, {"epochs", 2}},
                .datasets = {{"train",
                              muster::Dataset::from_tensors({{"x", at::arange(200, at::kFloat).view({-1, 1})}})},
                             {"blocked", blocked()}}})
        .fit();
  });
}
