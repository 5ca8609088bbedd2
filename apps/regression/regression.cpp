// Learns from a table of numbers: the loss of pressure in a pipe, from the pipe's size and material and the liquid in
// it.
//
//   regression_table 20000 > pipes.csv
//   muster convert csv pipes.csv pipes.h5 --split train=0.9 --split test=0.1
//   mpirun -n 2 regression --train pipes.train.h5 --test pipes.test.h5
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <muster/muster.hpp>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;

/// A preprocessor that the user has written, which needs no fitting. It moves the last feature of `x`, a number that
/// only identifies a material, into a column of its own.
class SplitOffMaterial final : public muster::Preprocessor {
 public:
  void fit(const muster::Dataset&, const muster::Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(muster::Batch& batch, at::Generator&) const override {
    const auto x = batch["x"];
    batch.set("x", x.narrow(1, 0, x.size(1) - 1));
    batch.set("material", x.select(1, -1).to(torch::kLong));
  }
  muster::Json state() const override { return nullptr; }
  void load_state(const muster::Json&) override {}
};

void train(muster::Session& session, const muster::Config& config) {
  // 1. A perceptron, which takes five numbers and the material as one of four (one-hot).
  const auto width = config.at("width").get<std::int64_t>();
  auto net = session.prepare_model(
      nn::Sequential(nn::Linear(5 + 4, width), nn::ReLU(), nn::Linear(width, width), nn::ReLU(), nn::Linear(width, 1)));
  auto optimizer = session.prepare_optimizer(torch::optim::AdamW(net->parameters(), config.at("lr").get<double>()));
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  const auto predict = [&](const muster::Batch& batch) {
    return net->forward(torch::cat({batch["x"], batch["material"]}, 1)).squeeze(1);
  };
  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    // 2. One pass over the training set. The preprocessors have already been applied to the batches.
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l = torch::mse_loss(predict(batch), batch["y"]);
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }

    // 3. R² on the test set, from sums over all ranks: the number of samples, Σy, Σy² and Σ(y − prediction)².
    auto sums = torch::zeros({4}, torch::kDouble);
    {
      const auto evaluation = session.evaluation(net);
      for (auto& batch : test_shard.iter_torch_batches()) {
        if (batch.size() == 0) continue;
        const auto y = batch["y"].to(torch::kDouble);
        sums += torch::stack({torch::ones_like(y), y, y.square(), (y - predict(batch)).square()}).sum(1);
      }
    }
    sums = session.mean(sums);  // the sums divided by the number of ranks, which cancels out in the quotient
    const auto variation = sums[2] - sums[1].square() / sums[0];
    session.report({{"loss", loss.take()}, {"r2", 1 - sums[3] / variation}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set, test_set;
  int epochs = 20;
  bool unscaled = false;
  launch.app().description("Learns a table of numbers and a category.");
  launch.app().add_option("--train", train_set, "Training set: columns x [6] and y")->required();
  launch.app().add_option("--test", test_set, "Test set")->required();
  launch.app().add_option("--epochs", epochs, "Passes over the training set")->capture_default_str();
  launch.app().add_flag("--unscaled", unscaled, "Do not scale the features, to show the effect of scaling");
  return launch.run([&] {
    // In SI units, diameters are hundredths and densities about a thousand: the scaler gives each feature mean 0 and
    // standard deviation 1. Scaler and encoder are fitted on the training set, and checkpoints hold their fitted state.
    std::vector<muster::PreprocessorPtr> steps{std::make_shared<SplitOffMaterial>(),
                                               muster::one_hot_encoder({"material"})};
    if (!unscaled) steps.push_back(muster::standard_scaler({"x"}));
    return muster::TorchTrainer(
               launch, train,
               {
                   .train_loop_config = {{"width", 64}, {"epochs", epochs}, {"lr", 3e-3}, {"batch_size", 64}},
                   .dataset_config = {.split_all = true},
                   .run_config = {.checkpoint_config = {.num_to_keep = 2, .checkpoint_score_attribute = "r2"}},
                   .datasets = {{"train", train_set}, {"test", test_set}},
                   .preprocessor = muster::chain(steps),
               })
        .fit();
  });
}
