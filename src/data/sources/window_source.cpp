#include "base/text.hpp"
#include "data/sources/file_source.hpp"
#include "data/sources/window_grid.hpp"
#include "data/sources/window_mask.hpp"
#include "data/sources/window_shape.hpp"
#include "data/sources/window_variable.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <optional>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr const char* opening = "opening windows";
constexpr const char* origin_name = "origin";

/// The values `begin` … `end` − 1 along a dimension.
struct DimensionPart {
  std::size_t dimension = 0;
  std::int64_t begin = 0, end = 0;
};

/// The path of the coordinate `name`, in the group of the variable at `place` or one around it; empty if there is none.
std::string find_coordinate(const hdf5::GroupPath& place, const std::string& name, const OpenFiles& files) {
  const hdf5::Lock lock;
  const auto file = std::ranges::find(files, place.path, &OpenFile::path)->handle.get();
  for (auto group = place.group; !group.empty();) {
    group.resize(group.rfind('/'));
    const auto opened = hdf5::open_group(file, group + "/", place.path);
    if (std::ranges::binary_search(hdf5::list(opened.get()), name)) return place.path + ":" + group + "/" + name;
  }
  return {};
}

/// The part of a dimension that an element of WindowOptions::range chooses. `path`: of the variable; `names`: of its
/// dimensions. The coordinate's file is added to `files` if it is not there.
DimensionPart part_of_dimension(const std::string& path, const std::vector<std::string>& names,
                                const decltype(WindowOptions::range)::value_type& range, OpenFiles& files) {
  const auto& [name, limits] = range;
  const auto refuse = [&](const std::string& fact, const std::string& remedy) {
    throw Error(ExitCode::data, "choosing a part of " + path + " by \"" + name + "\"", fact, remedy);
  };
  const auto dimension = std::ranges::find(names, name);
  if (name.empty() || dimension == names.end())
    refuse("it has no dimension of that name", "WindowOptions::range names dimensions; `muster inspect` shows them");
  const auto coordinate_path = find_coordinate(hdf5::GroupPath(path), name, files);
  if (coordinate_path.empty())
    refuse("there is no coordinate of that name", "Choose a part by index, with Dataset::subset");
  ChunkDecoding decoding(/*cache_bytes=*/0);
  const WindowVariable coordinate(coordinate_path, files, decoding, nullptr);
  if (coordinate.array().shape.size() != 1)
    refuse(str("the coordinate has ", coordinate.array().shape.size(), " dimensions"),
           "Choose a part by index, with Dataset::subset");
  const WindowShape whole({.size = {0}}, coordinate.array().shape, coordinate.dimension_names(), "reading " + path);
  const std::vector<std::int64_t> only{0};
  TensorPool pool;
  const auto values = coordinate.read(WindowCoordinates(&only, 1), whole, pool).to(at::kDouble);
  const auto* const begin = values.const_data_ptr<double>();
  const auto* const end = begin + values.numel();
  const auto is_inside = [&](double value) { return value >= limits.first && value <= limits.second; };
  const auto* const first = std::find_if(begin, end, is_inside);
  const auto* const last = std::find_if_not(first, end, is_inside);
  if (first == end) refuse("none of its values lies there", "Give limits in the units of the stored values");
  if (std::any_of(last, end, is_inside))
    refuse("its values do not ascend or descend: the part has gaps", "Choose a part by index, with Dataset::subset");
  return {static_cast<std::size_t>(dimension - names.begin()), first - begin, last - begin};
}

class WindowSource final : public FileSource {
 public:
  WindowSource(std::vector<std::string> variables, WindowOptions options)
      : FileSource(std::move(variables), options.cache_bytes), options_(std::move(options)) {
    if (paths_.empty()) throw Error(ExitCode::data, opening, "there are no variables", "Name at least one");
    if (!(options_.mask_share > 0 && options_.mask_share <= 1))
      throw Error(ExitCode::usage, opening, "mask_share is not above 0 and at most 1", "Give another share");
  }

  std::string shown() const override { return paths_.front(); }

  Batch read(std::span<const std::int64_t> samples) override {
    ensure_open();
    const watch::ScopedFileRead reading;
    const watch::TraceSpan span("read file");
    std::vector<std::vector<std::int64_t>> windows;
    for (const auto sample : samples) windows.push_back(coordinates(sample));
    std::vector<Batch::Item> items;
    for (const auto& variable : variables_) items.emplace_back(variable.name(), variable.read(windows, *shape_, pool_));
    auto origins = pool_.take({std::ssize(samples), std::ssize(shape_->array)}, at::kLong);
    auto* next = origins.mutable_data_ptr<std::int64_t>();
    for (const auto& window : windows)
      for (std::size_t d = 0; d < window.size(); ++d) *next++ = shape_->origin(d, window[d]);
    items.emplace_back(origin_name, std::move(origins));
    return Batch(std::move(items));
  }

  void expect(std::span<const std::int64_t> samples, Ahead how) override {
    ensure_open();
    if (blocks_.rows == 0) return;  // a pass in lanes may be resumed where all values fit into memory
    const watch::ScopedFileRead reading;
    const watch::TraceSpan span("read file ahead");
    std::vector<WindowRange> ranges;
    for (const auto sample : samples) {
      const auto first = sample / blocks_.rows * blocks_.rows, last = std::min(count_, first + blocks_.rows);
      for (auto next = first; next < last;) {
        auto [range, end] = windows_near(next, last);
        ranges.push_back(std::move(range));
        next = end;
      }
    }
    for (const auto* variable : in_tiles_) variable->expect(ranges, *shape_, how);
  }

 private:
  void open_all() override {
    open_variables();
    if (options_.mask) apply_mask();
    count_ = left_ ? left_->size() : grid_->size();
    for (const auto& file : files_)
      if (std::error_code none; !std::filesystem::is_directory(file.path, none)) open_files_.push_back(&file.bytes);
    const hdf5::Lock lock;
    share_memory();
  }
  std::string block_text() const override { return str("tiles of ", blocks_.rows, " windows"); }

  void open_variables() {
    {
      const hdf5::Lock lock;
      variables_.clear();  // drops what a failed attempt has opened
      files_.clear();
    }
    left_.reset();
    for (const auto& path : paths_) {
      variables_.emplace_back(path, files_, *decoding_, variables_.empty() ? nullptr : &variables_.front());
      require_new_name(variables_.back().name());
    }
    const auto& first = variables_.front();
    auto shape = first.array().shape;
    std::vector<std::int64_t> begin(shape.size(), 0);
    for (const auto& range : options_.range) {
      const auto part = part_of_dimension(paths_.front(), first.dimension_names(), range, files_);
      begin[part.dimension] = part.begin;
      shape[part.dimension] = part.end - part.begin;
    }
    shape_.emplace(options_, std::move(shape), first.dimension_names(), "opening windows of " + first.shown(),
                   std::move(begin));
    for (const auto& variable : variables_) schema_.push_back(variable.column(*shape_));
    schema_.push_back({origin_name, at::kLong, {std::ssize(shape_->array)}});
    tile_ = choose_tile();
    grid_.emplace(shape_->counts(), tile_);
  }

  /// Finds the windows that the mask leaves. Called without HDF5's lock, since this may take long.
  void apply_mask() {
    ChunkDecoding decoding(options_.cache_bytes);
    const WindowVariable mask(*options_.mask, files_, decoding, &variables_.front());
    left_ = windows_of_mask(mask, options_.mask_share, *shape_, *grid_);
    std::ranges::copy(decoding.foreign, std::back_inserter(decoding_->foreign));
    if (left_->size() == 0)
      throw Error(ExitCode::data, "opening windows of " + paths_.front(), "the mask leaves no window",
                  "Give another mask or a smaller mask_share");
  }

  void require_new_name(const std::string& name) const {
    if (name == origin_name || std::ranges::count(variables_, name, &WindowVariable::name) > 1)
      throw Error(ExitCode::data, opening, "there are two columns \"" + name + "\"",
                  "Choose variables of different names; \"origin\" is the place of each window");
  }

  /// How many windows along each dimension begin in one chunk, of the variable with the largest chunks along it.
  /// Without chunks the windows are numbered row by row.
  std::vector<std::int64_t> choose_tile() const {
    std::vector<std::int64_t> chunk(shape_->array.size(), 0);
    for (const auto& variable : variables_)
      for (std::size_t d = 0; d < variable.array().chunk.size(); ++d) {
        auto& largest = chunk[variable.dimensions()[d]];
        largest = std::max(largest, variable.array().chunk[d]);
      }
    auto tile = shape_->counts();
    for (std::size_t d = 0; d < tile.size(); ++d)
      if (chunk[d] > 0) tile[d] = std::clamp<std::int64_t>(chunk[d] / shape_->stride[d], 1, tile[d]);
    return tile;
  }

  /// Decides which variables are kept in memory whole, and makes blocks of tiles if any other one must be decoded.
  void share_memory() {
    in_tiles_.clear();
    std::vector<ArrayInBlocks> arrays;
    double bytes = 0;
    for (auto& variable : variables_) {
      const auto& array = variable.array();
      auto* const library = variable.library();
      if (variable.reads_directly(*shape_) || keep_whole(library, variable.all_bytes()) || array.chunk.empty())
        continue;
      in_tiles_.push_back(&variable);
      arrays.push_back({library, variable.file(), variable.bytes_of_tile(*shape_, tile_), array.chunk_slots()});
      bytes += arrays.back().block_bytes;
    }
    if (in_tiles_.empty()) return;
    if (left_) bytes *= 2;  // with a mask, a block may begin inside of a tile
    const auto share = static_cast<double>(count_) / static_cast<double>(grid_->size());
    blocks_.rows = std::max<std::int64_t>(1, std::llround(static_cast<double>(grid_->tile_size()) * share));
    blocks_.files = {count_};
    choose_lanes(bytes);
    keep_chunks(arrays, memory_left_);
  }

  std::vector<std::int64_t> coordinates(std::int64_t sample) const {
    return grid_->coordinates(left_ ? (*left_)[sample] : sample);
  }

  /// The range of samples `first` … `end` − 1, and `end`, which is at most `last`: these windows are as near to one
  /// another as those of a tile.
  std::pair<WindowRange, std::int64_t> windows_near(std::int64_t first, std::int64_t last) const {
    const auto begin = coordinates(first);
    WindowRange range{begin, begin};
    auto next = first + 1;
    for (; next < last; ++next) {
      const auto at = coordinates(next);
      auto wider = range;
      for (std::size_t d = 0; d < at.size(); ++d) {
        wider.least[d] = std::min(wider.least[d], at[d]);
        wider.most[d] = std::max(wider.most[d], at[d]);
        if (wider.most[d] - wider.least[d] >= tile_[d]) return {std::move(range), next};
      }
      range = std::move(wider);
    }
    return {std::move(range), next};
  }

  WindowOptions options_;
  OpenFiles files_;
  std::deque<WindowVariable> variables_;
  std::optional<WindowShape> shape_;
  std::optional<WindowGrid> grid_;
  std::vector<std::int64_t> tile_;         ///< the windows of a tile along each dimension
  std::optional<NumberSet> left_;          ///< the windows that the mask leaves
  std::vector<WindowVariable*> in_tiles_;  ///< variables whose chunks are read tile by tile
};

}  // namespace

std::shared_ptr<Source> window_source(std::vector<std::string> variables, WindowOptions options) {
  return std::make_shared<WindowSource>(std::move(variables), std::move(options));
}

}  // namespace muster::detail::data
