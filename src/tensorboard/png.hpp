// Encodes pictures as PNG.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster::detail::tensorboard {

struct Image {
  int height = 0, width = 0;
  int channels = 0;                  ///< 1: grey, 3: RGB, 4: RGBA
  std::vector<std::uint8_t> pixels;  ///< [height, width, channels]
};

std::string png_of(const Image& image);

}  // namespace muster::detail::tensorboard
