// tensorboard_peer … --set plan=FILE.json
//
// A run that logs what the plan says: for each step its values and pictures; a report at the end of each epoch, with
// the values of the weights and gradients beside their histograms. With "stop_at" rank 0 asks the run to stop at that
// step; with "throw_at" the training function throws there; with "die_at" the process ends there, without a word.
#include <torch/torch.h>
#include <muster/muster.hpp>

#include <unistd.h>

#include <csignal>
#include <fstream>
#include <stdexcept>

namespace {

using muster::Json;

at::Tensor picture(const Json& json) {
  const auto shape = json.at("shape").get<std::vector<std::int64_t>>();
  const auto values = json.at("values").get<std::vector<double>>();
  return at::tensor(values, at::kDouble).view(shape).to(json.at("bytes") ? at::kByte : at::kFloat);
}

/// A summary of a tensor, for the comparison with its histogram. Null for a gradient that is not there, as after a
/// resume at the end of an epoch.
Json summary_of(const at::Tensor& values) {
  if (!values.defined()) return nullptr;
  const auto all = values.detach().to(at::kDouble).flatten();
  return {all.min().item<double>(), all.max().item<double>(), all.numel(), all.sum().item<double>(),
          all.square().sum().item<double>()};
}

void train(muster::Session& session, const muster::Config& config) {
  const auto plan = Json::parse(std::ifstream(config.at("plan").get<std::string>()));
  auto net = session.prepare_model(torch::nn::Linear(4, 3));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  auto state = session.state({{"net", net}, {"optimizer", optimizer}});
  state.restore();
  auto shard = session.get_dataset_shard();
  for (auto epoch : session.epochs(plan.at("epochs"))) {
    for (auto& batch : shard.iter_torch_batches({.batch_size = 4, .dtypes = {{"x", torch::kFloat}}})) {
      optimizer.zero_grad();
      net->forward(batch["x"].unsqueeze(1).expand({-1, 4})).square().mean().backward();
      optimizer.step();
      const auto step = session.global_step();
      if (step == plan.value("die_at", -1)) ::raise(SIGKILL);
      if (step == plan.value("throw_at", -1)) throw std::runtime_error("as planned");
      if (step == plan.value("stop_at", -1) && session.world_rank() == 0) ::raise(SIGUSR1);
      for (const auto& logged : plan.at("steps").at(static_cast<std::size_t>(step)))
        if (logged.contains("shape"))
          session.log_image(logged.at("name"), picture(logged));
        else
          session.log_scalar(logged.at("name"),
                             logged.at("value").is_null() ? std::nan("") : logged.at("value").get<double>());
    }
    // Before the report, which ends the run if it is asked to stop.
    if (session.world_rank() == 0) {
      Json line;
      for (const auto& parameter : net->named_parameters()) {
        line["weights/" + parameter.key()] = summary_of(parameter.value());
        line["gradients/" + parameter.key()] = summary_of(parameter.value().grad());
      }
      line["step"] = session.global_step();
      std::ofstream(session.artifacts() / "summaries", std::ios::app) << line << '\n';
    }
    session.report({{"loss", 1.0 / (1 + epoch)}, {"seen", static_cast<double>(session.global_step())}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  return launch.run([&] {
    Json samples;
    for (int i = 0; i < 24; ++i) samples.push_back({{"x", i / 24.0}});
    return muster::TorchTrainer(launch, train,
                                {.train_loop_config = {{"plan", ""},
                                                       {"optimizer", {{"lr", 0.1}, {"nesterov", false}}},
                                                       {"layers", {3, 4}}},
                                 .run_config = {.histogram_interval = 2},
                                 .datasets = {{"train", muster::Dataset::from_items(samples)}}})
        .fit();
  });
}
