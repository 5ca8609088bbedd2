#include "data/sources/window_shape.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <utility>

namespace muster::detail::data {

WindowShape::WindowShape(const WindowOptions& options, std::vector<std::int64_t> shape,
                         const std::vector<std::string>& names, const std::string& doing,
                         std::vector<std::int64_t> begin)
    : first(std::move(begin)),
      array(std::move(shape)),
      size(options.size),
      stride(options.stride),
      margin(options.margin) {
  const auto rank = array.size();
  first.resize(rank, 0);
  const auto require_rank = [&](const std::vector<std::int64_t>& numbers, const std::string& name) {
    if (numbers.size() != rank)
      throw Error(
          ExitCode::usage, doing,
          str("WindowOptions::", name, " has ", numbers.size(), " numbers, the variable has ", rank, " dimensions"),
          "Give one for each dimension");
  };
  require_rank(size, "size");
  if (stride.empty()) stride.assign(rank, 0);
  if (margin.empty()) margin.assign(rank, 0);
  require_rank(stride, "stride");
  require_rank(margin, "margin");
  constexpr std::int64_t most_value_bytes = 16;
  std::int64_t bytes = most_value_bytes, windows = 1;
  for (std::size_t d = 0; d < rank; ++d) {
    const auto along = str("along dimension ", d, names[d].empty() ? "" : " (" + names[d] + ")");
    if (size[d] < 0 || stride[d] < 0 || margin[d] < 0)
      throw Error(ExitCode::usage, doing, "size, stride or margin is negative " + along, "Give 0 or more");
    if (size[d] == 0) size[d] = array[d];
    if (stride[d] == 0) stride[d] = size[d];
    if (size[d] > array[d] || array[d] == 0)
      throw Error(ExitCode::data, doing, str("a window has ", size[d], " values ", along, ", the variable ", array[d]),
                  "Give a smaller size");
    if (margin[d] > array[d])
      throw Error(ExitCode::usage, doing,
                  str("a margin has ", margin[d], " values ", along, ", the variable ", array[d]),
                  "Give a smaller margin");
    static_cast<void>(checked_product(array[d], std::int64_t{3}, doing, "its shape"));  // extent() must not overflow
    bytes = checked_product(bytes, extent(d), doing, "a window");
    windows = checked_product(windows, counts()[d], doing, "the number of windows");
  }
}

std::vector<std::int64_t> WindowShape::counts() const {
  std::vector<std::int64_t> counts;
  for (std::size_t d = 0; d < array.size(); ++d)
    counts.push_back(stride[d] == 0 ? 1 : (array[d] - size[d]) / stride[d] + 1);
  return counts;
}

}  // namespace muster::detail::data
