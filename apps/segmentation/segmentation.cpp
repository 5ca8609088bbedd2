// Finds clothes in noisy pictures, pixel by pixel: a small U-Net on scenes of several Fashion-MNIST garments.
//
//   mpirun -n 2 segmentation
//   mpirun -n 4 segmentation --scenes 20000 --width 32 --epochs 10 --name large
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <muster/muster.hpp>
#include <numeric>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;

constexpr std::int64_t scene_size = 48, garment_size = 28, garments_per_scene = 2;

/// The kinds of pixels, and the kind for each class of Fashion-MNIST. Garments of classes with the kind `ground` are
/// left out.
enum Kind : std::uint8_t { ground, pullover, trousers, bag, boot, kinds };
const std::vector<std::uint8_t> kind_of_class{ground, trousers, pullover, ground, ground,
                                              ground, ground,   ground,   bag,    boot};

/// Makes scenes [N, 48, 48] of garments on noise, with the kind of each pixel. Later garments cover earlier ones. All
/// ranks get the same scenes.
muster::Dataset make_scenes(const muster::Dataset& garments, std::int64_t scenes, std::uint64_t seed) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(garments.count()));
  std::iota(all.begin(), all.end(), 0);
  const auto batch = garments.read(all);
  const auto kind = torch::tensor(kind_of_class, torch::kUInt8).index_select(0, batch["y"].to(torch::kLong));
  const auto known = kind.nonzero().squeeze(1);

  auto random = at::detail::createCPUGenerator(seed);
  auto images = torch::randint(0, 100, {scenes, scene_size, scene_size}, random, torch::kUInt8);
  auto labels = torch::full({scenes, scene_size, scene_size}, ground, torch::kUInt8);
  for (std::int64_t i = 0; i < scenes * garments_per_scene; ++i) {
    const auto chosen = known[torch::randint(known.size(0), {1}, random).item<std::int64_t>()].item<std::int64_t>();
    const auto corner = torch::randint(scene_size - garment_size + 1, {2}, random, torch::kLong);
    const auto place = [&](const torch::Tensor& scenes) {
      return scenes[i / garments_per_scene]
          .narrow(0, corner[0].item<std::int64_t>(), garment_size)
          .narrow(1, corner[1].item<std::int64_t>(), garment_size);
    };
    const auto garment = batch["x"][chosen];
    place(images).copy_(garment.where(garment > 0, place(images)));
    place(labels).masked_fill_(garment > 0, kind[chosen]);
  }
  return muster::Dataset::from_tensors({{"image", images}, {"label", labels}});
}

/// Two 3 × 3 convolutions.
nn::Sequential convolutions(std::int64_t in, std::int64_t out) {
  const auto convolution = [](std::int64_t from, std::int64_t to) {
    return nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1).bias(false));
  };
  return nn::Sequential(convolution(in, out), nn::BatchNorm2d(out), nn::ReLU(), convolution(out, out),
                        nn::BatchNorm2d(out), nn::ReLU());
}

/// U-Net (Ronneberger, Fischer and Brox 2015) with three levels: [N, 1, H, W] to logits [N, kinds, H, W]. H and W must
/// be multiples of 4.
class UNet : public nn::Module {
 public:
  explicit UNet(std::int64_t width)
      : down1(register_module("down1", convolutions(1, width))),
        down2(register_module("down2", convolutions(width, 2 * width))),
        bottom(register_module("bottom", convolutions(2 * width, 4 * width))),
        up2(register_module("up2", convolutions(6 * width, 2 * width))),
        up1(register_module("up1", convolutions(3 * width, width))),
        logits(register_module("logits", nn::Conv2d(width, kinds, 1))) {}

  torch::Tensor forward(const torch::Tensor& image) {
    const auto a = down1->forward(image);
    const auto b = down2->forward(torch::max_pool2d(a, 2));
    const auto c = bottom->forward(torch::max_pool2d(b, 2));
    const auto d = up2->forward(torch::cat({twice_as_large(c), b}, 1));
    const auto e = up1->forward(torch::cat({twice_as_large(d), a}, 1));
    return logits(e);
  }

 private:
  static torch::Tensor twice_as_large(const torch::Tensor& x) {
    return torch::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)});
  }
  nn::Sequential down1, down2, bottom, up2, up1;
  nn::Conv2d logits;
};

torch::Tensor normalize(const torch::Tensor& images) { return images.to(torch::kFloat).div_(255).unsqueeze_(1); }

void train(muster::Session& session, const muster::Config& config) {
  // 1. The model and its optimizer, the state, the data.
  auto net = session.prepare_model(std::make_shared<UNet>(config.at("width").get<std::int64_t>()));
  auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), config.at("lr").get<double>()));
  muster::Mean loss;
  auto state = session.state({{"model", net}, {"optimizer", optimizer}, {"loss", loss}});
  state.restore();

  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  for ([[maybe_unused]] auto epoch : session.epochs(config.at("epochs"))) {
    // 2. One pass over the training scenes. The loss is a mean over pixels.
    for (auto& batch : train_shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      optimizer.zero_grad();
      const auto l =
          torch::cross_entropy_loss(net->forward(normalize(batch["image"])), batch["label"].to(torch::kLong));
      l.backward();
      optimizer.step();
      loss.add(l, batch.size());
    }

    // 3. Intersections and unions are counted over the test scenes of all ranks and divided only at the end: the mean
    //    of the quotients of each rank or batch would be another number.
    muster::MeanIoU mean_iou({.num_classes = kinds});
    muster::ConfusionMatrix confusion({.num_classes = kinds});
    {
      const auto evaluation = session.evaluation(net);
      for (auto& batch : test_shard.iter_torch_batches({.batch_size = 50})) {
        const auto logits = net->forward(normalize(batch["image"]));
        mean_iou.add(logits, batch["label"], batch.size());
        confusion.add(logits, batch["label"], batch.size());
      }
    }
    session.report({{"loss", loss.take()}, {"mean_iou", mean_iou}, {"confusion", confusion}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5");
  std::string test_set = example::data("fashion_mnist", "fashion-mnist-small.test.h5");
  std::int64_t scenes = 2000, width = 16;
  int epochs = 5;
  launch.app().description("Finds clothes in noisy pictures, pixel by pixel, with a small U-Net.");
  launch.app().add_option("--train", train_set, "Training garments: columns x [28, 28] and y")->capture_default_str();
  launch.app().add_option("--test", test_set, "Test garments")->capture_default_str();
  launch.app().add_option("--scenes", scenes, "Number of training pictures")->capture_default_str();
  launch.app().add_option("--width", width, "Channels of the first level")->capture_default_str();
  launch.app().add_option("--epochs", epochs, "Passes over the training set")->capture_default_str();
  return launch.run([&] {
    return muster::TorchTrainer(
               launch, train,
               {
                   .train_loop_config = {{"width", width}, {"epochs", epochs}, {"lr", 5e-3}, {"batch_size", 8}},
                   .dataset_config = {.split_all = true},
                   .run_config = {.checkpoint_config = {.num_to_keep = 2, .checkpoint_score_attribute = "mean_iou"}},
                   .datasets = {{"train", make_scenes(train_set, scenes, 1)},
                                {"test", make_scenes(test_set, scenes / 5, 2)}},
               })
        .fit();
  });
}
