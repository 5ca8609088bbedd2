#include "tensorboard/png.hpp"

#include "muster/error.hpp"

#include <png.h>

namespace muster::detail::tensorboard {

std::string png_of(const Image& image) {
  png_image picture{};
  picture.version = PNG_IMAGE_VERSION;
  picture.width = static_cast<png_uint_32>(image.width);
  picture.height = static_cast<png_uint_32>(image.height);
  picture.format = image.channels == 1 ? PNG_FORMAT_GRAY : image.channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(picture);
  std::string bytes(size, '\0');
  if (png_image_write_to_memory(&picture, bytes.data(), &size, 0, image.pixels.data(), 0, nullptr) == 0)
    throw Error(ExitCode::user_error, "making a picture", picture.message, "Log a smaller picture");
  bytes.resize(size);
  return bytes;
}

}  // namespace muster::detail::tensorboard
