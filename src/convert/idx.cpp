// Reads IDX files (http://yann.lecun.com/exdb/mnist/). Layout, big-endian: the bytes 0, 0, type, number of dimensions;
// then each size as a uint32; then the values.
#include "convert/convert.hpp"

#include <array>
#include <optional>
#include <utility>

namespace muster {
namespace {

using detail::convert::InputColumn, detail::convert::InputFile, detail::convert::NumberType;

std::optional<NumberType> type_of_code(std::byte code) {
  constexpr std::pair<int, NumberType> types[] = {{0x08, {'u', 1, true}}, {0x09, {'i', 1, true}},
                                                  {0x0B, {'i', 2, true}}, {0x0C, {'i', 4, true}},
                                                  {0x0D, {'f', 4, true}}, {0x0E, {'f', 8, true}}};
  for (const auto& [known, type] : types)
    if (known == std::to_integer<int>(code)) return type;
  return {};
}

InputColumn read_idx(const std::filesystem::path& path, const detail::convert::Progress& progress) {
  InputFile file(path, progress);
  std::array<std::byte, 4> magic{};
  file.read(magic);
  const auto type = type_of_code(magic[2]);
  if (magic[0] != std::byte{0} || magic[1] != std::byte{0} || !type)
    file.reject("it is not an IDX file: its first bytes are not 0, 0 and a type", "Check that it was downloaded whole");
  std::vector<std::uint64_t> shape;
  for (int dimensions = std::to_integer<int>(magic[3]); dimensions > 0; --dimensions) {
    std::array<std::byte, 4> size{};
    file.read(size);
    std::uint64_t value = 0;
    for (const auto byte : size) value = value << 8 | std::to_integer<std::uint64_t>(byte);
    shape.push_back(value);
  }
  return InputColumn(*type, shape, std::move(file));
}

}  // namespace

std::vector<std::filesystem::path> convert_idx(const std::vector<std::filesystem::path>& inputs,
                                               const std::filesystem::path& output, const ConvertOptions& options) {
  const auto names = detail::convert::names_of(inputs.size(), options);
  detail::convert::check_conversion(inputs, inputs.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (const auto& input : inputs) columns.push_back(read_idx(input, options.progress));
  return detail::convert::convert_columns(std::move(columns), names, output, options);
}

}  // namespace muster
