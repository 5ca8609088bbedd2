// Makes colour pictures to train resnet50.cpp on if you have no ImageNet: each shows a garment of Fashion-MNIST,
// randomly scaled, coloured and placed on a darker background, with noise.
//
//   resnet50_images --size 72 --train 20000 --test 2000          # pictures.train.h5 and pictures.test.h5
#include "models/data.hpp"

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <array>
#include <filesystem>
#include <fstream>
#include <muster/muster.hpp>
#include <string>
#include <vector>

namespace {

/// Makes a picture [3, size, size] of a garment [28, 28].
torch::Tensor picture(const torch::Tensor& garment, std::int64_t size) {
  const auto side = torch::randint(size * 3 / 4, size + 1, {1}).item<std::int64_t>();
  const auto corner = torch::randint(size - side + 1, {2});
  auto shade = torch::zeros({size, size});  // 0 is background, 1 the brightest spot of the garment
  shade.narrow(0, corner[0].item<std::int64_t>(), side)
      .narrow(1, corner[1].item<std::int64_t>(), side)
      .copy_(torch::upsample_bilinear2d(garment.to(torch::kFloat).div_(255).view({1, 1, 28, 28}), {side, side}, false)
                 .view({side, side}));
  const auto ground = 0.5 * torch::rand({3, 1, 1}), colour = 0.5 + 0.5 * torch::rand({3, 1, 1});
  const auto coloured = ground + shade * (colour - ground) + 0.05 * torch::randn({3, size, size});
  return coloured.clamp(0, 1).mul(255).to(torch::kUInt8);
}

/// Begins a file of bytes in the format of MNIST (IDX) with its head: a magic number and the sizes, big-endian.
std::ofstream idx_file(const std::filesystem::path& path, const std::vector<std::int64_t>& shape) {
  std::ofstream file(path, std::ios::binary);
  file.exceptions(std::ios::failbit | std::ios::badbit);
  const auto put = [&](std::int64_t number) {
    for (const int shift : {24, 16, 8, 0}) file.put(static_cast<char>(number >> shift));
  };
  put(0x0800 + static_cast<std::int64_t>(shape.size()));
  for (const auto extent : shape) put(extent);
  return file;
}

void make(const std::string& part, std::int64_t count, std::int64_t size) {
  const muster::Dataset garments(example::data("fashion_mnist", "fashion-mnist-small." + part + ".h5"));
  const std::filesystem::path x = "pictures." + part + ".x.idx", y = "pictures." + part + ".y.idx";
  {
    auto pictures = idx_file(x, {count, 3, size, size});
    auto labels = idx_file(y, {count});
    for (std::int64_t i = 0; i < count; ++i) {
      const auto sample = garments.read(std::array{i % garments.count()});
      const auto bytes = picture(sample["x"][0], size);
      pictures.write(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
      labels.put(static_cast<char>(sample["y"].item<int>()));
    }
  }
  muster::convert_idx({x, y}, "pictures." + part + ".h5");
  std::filesystem::remove(x);
  std::filesystem::remove(y);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Makes pictures of Fashion-MNIST's garments: pictures.train.h5 and pictures.test.h5.");
  std::int64_t size = 72, train = 20000, test = 2000;
  app.add_option("--size", size, "Width and height of the pictures")->capture_default_str();
  app.add_option("--train", train, "Number of training pictures")->capture_default_str();
  app.add_option("--test", test, "Number of test pictures")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  torch::manual_seed(0);
  make("train", train, size);
  make("test", test, size);
}
