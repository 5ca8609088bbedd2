// Generates pictures of clothes: a generative adversarial network of two models with two optimizers (DCGAN) on
// Fashion-MNIST.
//
//   mpirun -n 2 dcgan                           # pictures/epoch_0.png, …
//   mpirun -n 4 dcgan --epochs 50 --width 64 --train train.h5 --name large
#include "models/data.hpp"

#include <png.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <muster/muster.hpp>
#include <stdexcept>
#include <string>
#include <tuple>

namespace {

namespace nn = torch::nn;

constexpr std::int64_t latent = 64;

nn::ConvTranspose2d up(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return nn::ConvTranspose2d(
      nn::ConvTranspose2dOptions(in, out, kernel).stride(stride).padding(stride / 2).bias(false));
}
nn::Conv2d down(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(stride / 2).bias(false));
}
nn::LeakyReLU leaky() { return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)); }

/// Noise [N, latent, 1, 1] to pictures [N, 1, 28, 28] between -1 and 1 (Radford, Metz and Chintala 2015).
nn::Sequential make_generator(std::int64_t width) {
  return nn::Sequential(up(latent, 4 * width, 7, 1), nn::BatchNorm2d(4 * width), nn::ReLU(),     // 7 × 7
                        up(4 * width, 2 * width, 4, 2), nn::BatchNorm2d(2 * width), nn::ReLU(),  // 14 × 14
                        up(2 * width, 1, 4, 2), nn::Tanh());                                     // 28 × 28
}

/// Pictures to logits [N]; a positive logit means that the picture looks real.
nn::Sequential make_discriminator(std::int64_t width) {
  return nn::Sequential(down(1, width, 4, 2), leaky(), down(width, 2 * width, 4, 2), nn::BatchNorm2d(2 * width),
                        leaky(), down(2 * width, 1, 7, 1), nn::Flatten(nn::FlattenOptions().start_dim(0)));
}

/// Sets the weights of all convolutions as Radford, Metz and Chintala do: normal, with standard deviation 0.02.
void initialize(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : module.named_parameters())
    if (parameter.value().dim() == 4) parameter.value().normal_(0, 0.02);
}

/// Returns the loss of the discriminator's logits if the right answer for all pictures is `real`.
torch::Tensor loss_of(const torch::Tensor& logits, bool real) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, real ? 1.0 : 0.0));
}

/// Writes pictures [64, 1, 28, 28] as one grey picture, a grid of 8 × 8.
void write_png(const std::filesystem::path& path, const torch::Tensor& pictures) {
  std::filesystem::create_directories(path.parent_path());
  const auto grid =
      pictures.view({8, 8, 28, 28}).permute({0, 2, 1, 3}).add(1).mul(127.5).to(torch::kUInt8).contiguous();
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.format = PNG_FORMAT_GRAY;
  image.width = image.height = 8 * 28;
  if (png_image_write_to_file(&image, path.c_str(), 0, grid.const_data_ptr(), 0, nullptr) == 0)
    throw std::runtime_error("writing " + path.string() + ": " + image.message);
}

void train(muster::Session& session, const muster::Config& config) {
  // 1. Two models, each with its own optimizer.
  const auto width = config.at("width").get<std::int64_t>();
  auto generator = make_generator(width), discriminator = make_discriminator(width);
  initialize(*generator);
  initialize(*discriminator);
  std::tie(generator, discriminator) = session.prepare_models(generator, discriminator);
  const auto adam = torch::optim::AdamOptions(config.at("lr").get<double>()).betas({0.5, 0.999});
  auto generator_optimizer = session.prepare_optimizer(torch::optim::Adam(generator->parameters(), adam));
  auto discriminator_optimizer = session.prepare_optimizer(torch::optim::Adam(discriminator->parameters(), adam));

  muster::Mean generator_loss, discriminator_loss;
  auto state = session.state({{"generator", generator},
                              {"discriminator", discriminator},
                              {"generator_optimizer", generator_optimizer},
                              {"discriminator_optimizer", discriminator_optimizer},
                              {"generator_loss", generator_loss},
                              {"discriminator_loss", discriminator_loss}});
  state.restore();

  // 2. Noise for the pictures after every epoch. It is the same each time and on all ranks, to make progress visible.
  const auto noise = torch::randn({64, latent, 1, 1}, at::detail::createCPUGenerator(session.seed()));

  // 3. The sum of all real pictures, for comparison, from a pass that does not train.
  auto shard = session.get_dataset_shard("train");
  auto sum_of_real = torch::zeros({28 * 28});
  for (auto& batch : shard.iter_torch_batches({.training = false}))
    sum_of_real += batch["x"].narrow(0, 0, batch.size()).to(torch::kFloat).sum(0).flatten();
  sum_of_real = session.mean(sum_of_real);  // the sum divided by the number of ranks, which gives the same correlation

  for (auto epoch : session.epochs(config.at("epochs"))) {
    for (auto& batch : shard.iter_torch_batches({.batch_size = config.at("batch_size"), .shuffle = true})) {
      const auto real = batch["x"].to(torch::kFloat).div_(127.5).sub_(1).unsqueeze_(1);
      const auto fake = generator->forward(torch::randn({real.size(0), latent, 1, 1}, real.options()));

      // 4. The discriminator learns to tell real pictures from generated ones.
      discriminator_optimizer.zero_grad();
      const auto d =
          loss_of(discriminator->forward(real), true) + loss_of(discriminator->forward(fake.detach()), false);
      d.backward();
      discriminator_optimizer.step();

      // 5. The generator learns to make pictures that the discriminator takes for real.
      generator_optimizer.zero_grad();
      const auto g = loss_of(discriminator->forward(fake), true);
      g.backward();
      generator_optimizer.step();

      discriminator_loss.add(d, batch.size());
      generator_loss.add(g, batch.size());
    }

    // 6. Pictures of the present generator, and how much they look like clothes: the correlation between their mean and
    //    the mean real picture, which is about 0 for noise.
    torch::Tensor pictures;
    {
      const auto evaluation = session.evaluation(generator);
      pictures = generator->forward(noise);
    }
    const auto likeness = torch::corrcoef(torch::stack({pictures.mean(0).flatten(), sum_of_real}))[0][1];
    if (session.world_rank() == 0)
      write_png(
          std::filesystem::path(config.at("pictures").get<std::string>()) / ("epoch_" + std::to_string(epoch) + ".png"),
          pictures);
    session.report({{"discriminator_loss", discriminator_loss.take()},
                    {"generator_loss", generator_loss.take()},
                    {"likeness", likeness}},
                   state);
  }
}

}  // namespace

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string train_set = example::data("fashion_mnist", "fashion-mnist-small.train.h5"), pictures = "pictures";
  std::int64_t width = 32;
  int epochs = 20;
  launch.app().description("Generates pictures of clothes: a DCGAN on Fashion-MNIST.");
  launch.app().add_option("--train", train_set, "Training set: column x [28, 28]")->capture_default_str();
  launch.app().add_option("--pictures", pictures, "The folder for pictures")->capture_default_str();
  launch.app().add_option("--width", width, "Channels of the largest pictures")->capture_default_str();
  launch.app().add_option("--epochs", epochs, "Passes over the training set")->capture_default_str();
  return launch.run([&] {
    return muster::TorchTrainer(
               launch, train,
               {
                   .train_loop_config =
                       {{"width", width}, {"epochs", epochs}, {"lr", 2e-4}, {"batch_size", 64}, {"pictures", pictures}},
                   .run_config = {.checkpoint_config = {.num_to_keep = 1}},
                   .datasets = {{"train", train_set}},
               })
        .fit();
  });
}
