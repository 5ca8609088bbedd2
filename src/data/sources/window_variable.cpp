#include "data/sources/window_variable.hpp"

#include "base/text.hpp"
#include "data/sources/scattered_read.hpp"
#include "hdf5/fields.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"
#include "zarr/open_file.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace muster::detail::data {
namespace {

std::string text_of(const std::vector<std::string>& names, const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::size_t d = 0; d < shape.size(); ++d)
    text += str(d == 0 ? "" : ", ", names[d].empty() ? "" : names[d] + " ", shape[d]);
  return "(" + text + ")";
}

/// True if two dimensions have the same size, other than 1: two dimensions of size 1 can be taken for one another
/// without harm.
bool has_equal_sizes(std::vector<std::int64_t> sizes) {
  std::erase(sizes, 1);
  std::ranges::sort(sizes);
  return std::ranges::adjacent_find(sizes) != sizes.end();
}

bool has_names(const std::vector<std::string>& names) { return std::ranges::count(names, "") == 0; }

}  // namespace

WindowVariable::WindowVariable(const std::string& path, OpenFiles& files, ChunkDecoding& decoding,
                               const WindowVariable* first) {
  const hdf5::GroupPath place(path);
  if (place.group.ends_with('/'))
    throw Error(ExitCode::data, "opening " + path, "no variable is named", "Name one, as FILE.nc:/VARIABLE");
  name_ = place.group.substr(place.group.rfind('/') + 1);
  auto file = std::ranges::find(files, place.path, &OpenFile::path);
  if (file == files.end()) {
    files.push_back({place.path, zarr::open_file(place.path), open_for_pieces(zarr::main_file(place.path))});
    file = files.end() - 1;
  }
  file_ = &*file;
  {
    const hdf5::Lock lock;
    dataset_ = place.path + ":" + hdf5::parts_of(file_->handle.get(), place.group).first;
  }
  auto array = open_array(file_->handle.get(), file_->bytes, place.group, path, decoding);
  names_ = array.dimensions;
  dimensions_.resize(array.shape.size());
  std::iota(dimensions_.begin(), dimensions_.end(), std::size_t{0});
  reader_ = make_box_reader(std::move(array));
  if (first != nullptr) match(*first);
}

void WindowVariable::match(const WindowVariable& first) {
  const auto& shape = array().shape;
  const auto& others = first.array().shape;
  const auto refuse = [&](const std::string& remedy) {
    throw Error(ExitCode::data, "opening windows of " + shown(),
                "its dimensions are " + text_of(names_, shape) + ", those of " + first.shown() + " are " +
                    text_of(first.names_, others),
                remedy);
  };
  const bool by_name = has_names(names_) && has_names(first.names_);
  if (by_name) {
    for (std::size_t d = 0; d < shape.size(); ++d) {
      // A matrix may have a dimension twice: the second one of a name matches the second one of that name in `first`.
      auto found = std::ranges::find(first.names_, names_[d]);
      if (found == first.names_.end()) refuse("Name the variable with all dimensions first");
      for (auto before = std::count(names_.begin(), names_.begin() + static_cast<std::ptrdiff_t>(d), names_[d]);
           before > 0 && found != first.names_.end(); --before)
        found = std::find(found + 1, first.names_.end(), names_[d]);
      if (found == first.names_.end())
        refuse("Choose variables that have a repeated dimension as often as the first one");
      dimensions_[d] = static_cast<std::size_t>(found - first.names_.begin());
    }
    for (const auto& name : names_)
      if (std::ranges::count(names_, name) != std::ranges::count(first.names_, name))
        refuse("Choose variables that have a repeated dimension as often as the first one");
  } else if (shape.size() != others.size()) {
    refuse("Without names of dimensions, as NetCDF has them, variables must have the same shape");
  }
  for (std::size_t d = 0; d < shape.size(); ++d)
    if (shape[d] != others[dimensions_[d]]) refuse("Variables must have the same size along a dimension");
  if (!by_name && dataset_ != first.dataset_ && has_equal_sizes(shape))
    refuse(
        "Name the dimensions of both, as NetCDF does (in h5py: make_scale and attach_scale): their sizes do not say "
        "which "
        "of them belong together");
}

Column WindowVariable::column(const WindowShape& shape) const {
  Column column{name_, array().conversion.dtype(), {}};
  for (const auto d : dimensions_) column.shape.push_back(shape.extent(d));
  return column;
}

bool WindowVariable::reads_directly(const WindowShape& shape) const {
  return reader_->reads_directly(shape.size[dimensions_.back()]);
}

double WindowVariable::all_bytes() const {
  auto bytes = static_cast<double>(array().conversion.stored_bytes());
  for (std::size_t d = 0; d < array().shape.size(); ++d) {
    const auto unit = array().chunks ? static_cast<double>(array().chunk[d]) : 1.0;
    bytes *= std::ceil(static_cast<double>(array().shape[d]) / unit) * unit;
  }
  return bytes;
}

double WindowVariable::bytes_of_tile(const WindowShape& shape, const std::vector<std::int64_t>& tile) const {
  auto bytes = static_cast<double>(array().record_bytes);
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    const auto of = dimensions_[d];
    const auto chunk = array().chunk.empty() ? 1.0 : static_cast<double>(array().chunk[d]);
    const auto values = static_cast<double>(tile[of] - 1) * static_cast<double>(shape.stride[of]) +
                        static_cast<double>(shape.extent(of));
    const auto touched = std::ceil((values - 1) / chunk) + 1;  // wherever the tile begins
    bytes *= chunk * std::min(touched, std::ceil(static_cast<double>(array().shape[d]) / chunk));
  }
  return bytes;
}

Box WindowVariable::box_of(const std::vector<std::int64_t>& window, const WindowShape& shape) const {
  Box box;
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    const auto of = dimensions_[d];
    const auto begin = shape.origin(of, window[of]) - shape.margin[of];
    box.begin.push_back(std::max<std::int64_t>(0, begin));
    box.size.push_back(std::min(array().shape[d], begin + shape.extent(of)) - box.begin.back());
  }
  return box;
}

at::Tensor WindowVariable::read(WindowCoordinates windows, const WindowShape& shape, TensorPool& pool) const {
  const auto& conversion = array().conversion;
  const auto column = this->column(shape);
  auto sizes = column.shape;
  sizes.insert(sizes.begin(), std::ssize(windows));
  auto tensor = pool.take(sizes, column.dtype);

  // Stored values go to the end of their window's memory, from where they are converted in place.
  auto bytes = conversion.stored_bytes();
  std::vector<std::size_t> strides(column.shape.size());
  for (auto d = strides.size(); d-- > 0; bytes *= static_cast<std::size_t>(column.shape[d])) strides[d] = bytes;
  const auto values = bytes / conversion.stored_bytes(), window_bytes = values * c10::elementSize(column.dtype);
  auto* next = static_cast<std::byte*>(tensor.mutable_data_ptr());
  std::vector<Box> boxes;
  for (const auto& window : windows) {
    auto& box = boxes.emplace_back(box_of(window, shape));
    if (box.size != column.shape) std::memset(next, 0, window_bytes);
    box.into = next + window_bytes - bytes;
    next += window_bytes;
  }
  reader_->read(file_->bytes, boxes, strides);

  next = static_cast<std::byte*>(tensor.mutable_data_ptr());
  for (std::size_t i = 0; i < boxes.size(); ++i, next += window_bytes) {
    if (conversion(next, values) < values)
      throw Error(ExitCode::data, "reading " + shown(), "it holds a number above 2^63 − 1, too large for a tensor",
                  "Convert it, or choose other variables");
    if (boxes[i].size != column.shape) pad(tensor[static_cast<std::int64_t>(i)], boxes[i], windows[i], shape);
  }
  return tensor;
}

void WindowVariable::pad(at::Tensor window, const Box& box, const std::vector<std::int64_t>& coordinates,
                         const WindowShape& shape) const {
  const at::NoGradGuard no_grad;
  // The window as it was read begins with its first value inside of the variable.
  auto read = window, place = window;
  for (std::size_t d = 0; d < dimensions_.size(); ++d) {
    const auto of = dimensions_[d];
    const auto before = box.begin[d] - (shape.origin(of, coordinates[of]) - shape.margin[of]);
    read = read.narrow(static_cast<std::int64_t>(d), 0, box.size[d]);
    place = place.narrow(static_cast<std::int64_t>(d), before, box.size[d]);
  }
  const auto inside = read.clone();
  if (at::isFloatingType(window.scalar_type()) || at::isComplexType(window.scalar_type()))
    window.fill_(std::numeric_limits<double>::quiet_NaN());
  else
    window.zero_();
  place.copy_(inside);
}

void WindowVariable::expect(std::span<const WindowRange> ranges, const WindowShape& shape, Ahead how) const {
  std::vector<Box> boxes;
  for (const auto& [least, most] : ranges) {
    auto box = box_of(least, shape);
    const auto last = box_of(most, shape);
    for (std::size_t d = 0; d < box.begin.size(); ++d) box.size[d] = last.begin[d] + last.size[d] - box.begin[d];
    boxes.push_back(std::move(box));
  }
  reader_->expect(file_->bytes, boxes, how);
}

}  // namespace muster::detail::data
