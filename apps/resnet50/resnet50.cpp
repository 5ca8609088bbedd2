// Trains ResNet-50 as on ImageNet: random crops and flips, mixed precision, a learning rate that rises first and then
// falls as a cosine, and large steps that are divided among the ranks.
//
//   resnet50_images                                  # pictures.train.h5, pictures.test.h5
//   mpirun -n 2 resnet50 --train pictures.train.h5 --test pictures.test.h5
//   mpirun -n 8 resnet50 --train train.h5 --test val.h5 --classes 1000 --crop 224 --gpu --set batch_size=256
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <muster/muster.hpp>
#include <string>

namespace {

namespace nn = torch::nn;

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Convolutions of 1 × 1, 3 × 3 and 1 × 1 with a residual connection. The middle one has the stride.
class Bottleneck : public nn::Module {
 public:
  static constexpr std::int64_t expansion = 4;

  Bottleneck(std::int64_t in, std::int64_t width, std::int64_t stride)
      : conv1(register_module("conv1", convolution(in, width, 1))),
        bn1(register_module("bn1", nn::BatchNorm2d(width))),
        conv2(register_module("conv2", convolution(width, width, 3, stride))),
        bn2(register_module("bn2", nn::BatchNorm2d(width))),
        conv3(register_module("conv3", convolution(width, expansion * width, 1))),
        bn3(register_module("bn3", nn::BatchNorm2d(expansion * width))) {
    // Each block begins as the identity, since the residual branch returns 0.
    nn::init::zeros_(bn3->weight);
    if (stride != 1 || in != expansion * width)
      downsample = register_module("downsample", nn::Sequential(convolution(in, expansion * width, 1, stride),
                                                                nn::BatchNorm2d(expansion * width)));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::relu(bn1(conv1(x)));
    y = torch::relu(bn2(conv2(y)));
    y = bn3(conv3(y));
    return torch::relu(y + (downsample.is_empty() ? x : downsample->forward(x)));
  }

 private:
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d conv3;
  nn::BatchNorm2d bn3;
  nn::Sequential downsample{nullptr};
};

/// ResNet-50 (He et al. 2015): [N, 3, H, W] to logits. If `width` is 64, the parameters have torchvision's names and
/// shapes.
class ResNet50 : public nn::Module {
 public:
  ResNet50(std::int64_t width, std::int64_t classes)
      : conv1(register_module("conv1", convolution(3, width, 7, 2))),
        bn1(register_module("bn1", nn::BatchNorm2d(width))),
        layer1(register_module("layer1", layer(width, width, 3, 1))),
        layer2(register_module("layer2", layer(4 * width, 2 * width, 4, 2))),
        layer3(register_module("layer3", layer(8 * width, 4 * width, 6, 2))),
        layer4(register_module("layer4", layer(16 * width, 8 * width, 3, 2))),
        fc(register_module("fc", nn::Linear(32 * width, classes))) {}

  torch::Tensor forward(const torch::Tensor& pictures) {
    const auto x = torch::max_pool2d(torch::relu(bn1(conv1(pictures))), 3, 2, 1);
    const auto y = layer4->forward(layer3->forward(layer2->forward(layer1->forward(x))));
    return fc(y.mean({2, 3}));
  }

 private:
  static nn::Sequential layer(std::int64_t in, std::int64_t width, int blocks, std::int64_t stride) {
    nn::Sequential layer{Bottleneck(in, width, stride)};
    for (int i = 1; i < blocks; ++i) layer->push_back(Bottleneck(Bottleneck::expansion * width, width, 1));
    return layer;
  }

  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Sequential layer1, layer2, layer3, layer4;
  nn::Linear fc;
};

/// Turns bytes into numbers around 0.
torch::Tensor normalize(const torch::Tensor& pictures) { return pictures.to(torch::kFloat).sub_(127.5).div_(64); }

/// Cuts a square of `crop` pixels at a random position out of each picture [N, 3, H, W], and mirrors half of the
/// pictures. Uses torch's generator, which is different on each rank and saved in checkpoints.
torch::Tensor random_crop_and_flip(const torch::Tensor& pictures, std::int64_t crop) {
  const auto n = pictures.size(0), channels = pictures.size(1), height = pictures.size(2), width = pictures.size(3);
  const auto index = torch::TensorOptions(torch::kLong).device(pictures.device());
  const auto along = torch::arange(crop, index);
  const auto flip = torch::randint(2, {n, 1}, index);
  const auto rows = torch::randint(height - crop + 1, {n, 1}, index) + along;
  const auto columns = torch::randint(width - crop + 1, {n, 1}, index) + torch::where(flip == 1, along.flip(0), along);
  return pictures.gather(2, rows.view({n, 1, crop, 1}).expand({n, channels, crop, width}))
      .gather(3, columns.view({n, 1, 1, crop}).expand({n, channels, crop, crop}));
}

torch::Tensor centre_crop(const torch::Tensor& pictures, std::int64_t crop) {
  return pictures.narrow(2, (pictures.size(2) - crop) / 2, crop).narrow(3, (pictures.size(3) - crop) / 2, crop);
}

void train(muster::Session& session, const muster::Config& config) {
  // 1. The model, and stochastic gradient descent with momentum. The configured rate is for 256 samples per step.
  auto net = session.prepare_model(
      std::make_shared<ResNet50>(config.at("width").get<std::int64_t>(), config.at("classes").get<std::int64_t>()));
  const auto step_size = config.at("batch_size").get<std::int64_t>();  // over all ranks
  auto optimizer = session.prepare_optimizer(
      torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(config.at("lr").get<double>() * step_size / 256)
                                               .momentum(0.9)
                                               .weight_decay(1e-4)
                                               .nesterov(true)));

  // 2. The learning rate rises during the first epochs, then falls to 0 as a cosine, step by step.
  auto train_shard = session.get_dataset_shard("train");
  auto test_shard = session.get_dataset_shard("test");
  const muster::BatchOptions batches{.global_batch_size = step_size, .shuffle = true, .drop_last = true};
  const auto steps = train_shard.count() / step_size, epochs = config.at("epochs").get<std::int64_t>();
  muster::CosineWithWarmup schedule(optimizer, {.warmup_steps = steps * config.at("warmup_epochs").get<std::int64_t>(),
                                                .total_steps = steps * epochs});

  // 3. 16 bits where that is safe and fast. In half precision small gradients would vanish without a scaler; bfloat16
  // has the range of float.
  const auto precision = config.at("precision").get<std::string>();
  const muster::AutocastOptions autocast{.dtype = precision == "half" ? torch::kHalf : torch::kBFloat16,
                                         .enabled = precision != "float"};
  auto scaler = session.grad_scaler({.enabled = precision == "half"});

  muster::Mean loss;
  auto state = session.state(
      {{"model", net}, {"optimizer", optimizer}, {"schedule", schedule}, {"scaler", scaler}, {"loss", loss}});
  state.restore();

  const auto crop = config.at("crop").get<std::int64_t>();
  for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
    // 4. One pass over the training set, with new crops in each.
    for (auto& batch : train_shard.iter_torch_batches(batches)) {
      optimizer.zero_grad();
      torch::Tensor l;
      {
        const auto scope = session.autocast(autocast);
        const auto logits = net->forward(normalize(random_crop_and_flip(batch["x"], crop)));
        l = torch::cross_entropy_loss(logits, batch["y"].to(torch::kLong), {}, at::Reduction::Mean, -100,
                                      /*label_smoothing=*/0.1);
      }
      scaler.scale(l).backward();
      scaler.step(optimizer);
      scaler.update();
      schedule.step();
      loss.add(l, batch.size());
    }

    // 5. Test on the centre of each picture of the test set.
    muster::Mean val_accuracy;
    {
      const auto evaluation = session.evaluation(net);
      const auto scope = session.autocast(autocast);
      for (auto& batch : test_shard.iter_torch_batches({.global_batch_size = step_size})) {
        const auto predicted = net->forward(normalize(centre_crop(batch["x"], crop))).argmax(1);
        val_accuracy.add(predicted.eq(batch["y"]).to(torch::kFloat).mean(), batch.size());
      }
    }
    session.report({{"loss", loss.take()}, {"val_accuracy", val_accuracy}}, state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set, test_set, precision;
  std::int64_t classes = 10, crop = 64, width = 64;
  bool gpu = false;
  launch.app().description("Trains ResNet-50 on colour pictures, as on ImageNet.");
  launch.app().add_option("--train", train_set, "Training set: columns x [3, H, W] of bytes, and y")->required();
  launch.app().add_option("--test", test_set, "Test set")->required();
  launch.app().add_option("--classes", classes, "Number of classes")->capture_default_str();
  launch.app().add_option("--crop", crop, "Width and height of the crops, in pixels")->capture_default_str();
  launch.app()
      .add_option("--width", width, "Channels of the first convolution; ResNet-50 has 64")
      ->capture_default_str();
  launch.app()
      .add_option("--precision", precision, "float, bfloat16 or half; default: bfloat16 on a GPU, float on a CPU")
      ->check(CLI::IsMember({"float", "bfloat16", "half"}));
  launch.app().add_flag("--gpu", gpu, "Train on a GPU per rank");
  return launch.run([&] {
    if (precision.empty()) precision = gpu ? "bfloat16" : "float";
    return muster::TorchTrainer(launch, train,
                                {
                                    .train_loop_config = {{"width", width},
                                                          {"classes", classes},
                                                          {"crop", crop},
                                                          {"precision", precision},
                                                          {"batch_size", 64},
                                                          {"lr", 0.1},
                                                          {"epochs", 10},
                                                          {"warmup_epochs", 1}},
                                    .scaling_config = {.use_gpu = gpu},
                                    .dataset_config = {.split_all = true},
                                    .run_config = {.checkpoint_config = {.num_to_keep = 2,
                                                                         .checkpoint_score_attribute = "val_accuracy"}},
                                    .datasets = {{"train", train_set}, {"test", test_set}},
                                })
        .fit();
  });
}
