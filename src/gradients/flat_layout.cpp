#include "gradients/flat_layout.hpp"

#include <map>
#include <tuple>
#include <utility>

namespace muster::detail::gradients {

FlatLayout::FlatLayout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<std::size_t>> members)
    : ranges(parameters.size()) {
  for (auto& in_block : members) {
    std::size_t count = 0;
    for (std::size_t number = 0; number < in_block.size(); ++number) {
      auto& range = ranges[in_block[number]];
      range = {blocks.size(), number, count, static_cast<std::size_t>(parameters[in_block[number]].numel())};
      count += range.count;
    }
    blocks.push_back({std::move(in_block), count});
  }
}

std::vector<std::vector<std::size_t>> by_type_and_device(const std::vector<at::Tensor>& parameters) {
  std::map<std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>, std::vector<std::size_t>> found;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto device = parameters[i].device();
    found[{parameters[i].scalar_type(), device.type(), device.index()}].push_back(i);
  }
  std::vector<std::vector<std::size_t>> members;
  for (auto& [key, some] : found) members.push_back(std::move(some));
  return members;
}

at::Tensor view_like(const at::Tensor& parameter, const at::Tensor& block, std::size_t first) {
  const auto piece = block.narrow(0, static_cast<std::int64_t>(first), parameter.numel());
  return parameter.is_non_overlapping_and_dense() ? piece.as_strided(parameter.sizes(), parameter.strides())
                                                  : piece.view(parameter.sizes());
}

}  // namespace muster::detail::gradients
