#include "data/sources/source.hpp"
#include "data/sources/window_grid.hpp"
#include "data/sources/window_shape.hpp"
#include "data/sources/window_variable.hpp"
#include "muster/error.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>
#include <utility>

namespace muster::detail::data {
namespace {

constexpr const char* opening = "opening windows";
constexpr const char* origin_name = "origin";

class WindowSource final : public Source {
 public:
  WindowSource(std::vector<std::string> variables, WindowOptions options)
      : paths_(std::move(variables)), options_(std::move(options)) {
    if (paths_.empty()) throw Error(ExitCode::data, opening, "there are no variables", "Name at least one");
    if (!(options_.mask_share > 0 && options_.mask_share <= 1))
      throw Error(ExitCode::usage, opening, "mask_share is not above 0 and at most 1", "Give another share");
  }

  std::int64_t count() override {
    ensure_open();
    return count_;
  }
  const Schema& schema() override {
    ensure_open();
    return schema_;
  }
  std::string shown() const override { return paths_.front(); }
  Blocks blocks() override {
    ensure_open();
    return blocks_;
  }

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
      for (std::size_t d = 0; d < window.size(); ++d) *next++ = window[d] * shape_->stride[d];
    items.emplace_back(origin_name, std::move(origins));
    return Batch(std::move(items));
  }

  void expect(std::span<const std::int64_t> samples) override {
    ensure_open();
    const watch::ScopedFileRead reading;
    const watch::TraceSpan span("read file ahead");
    std::vector<std::vector<std::int64_t>> windows;
    for (const auto sample : samples) {
      const auto first = sample / blocks_.rows * blocks_.rows;
      for (auto other = first; other < std::min(count_, first + blocks_.rows); ++other)
        windows.push_back(coordinates(other));
    }
    for (const auto* variable : in_tiles_) variable->expect(windows, *shape_);
  }

  DatasetFingerprint fingerprint() override {
    ensure_open();
    DatasetFingerprint print{.count = count_, .schema = schema_text(schema_)};
    if (blocks_.rows > 0)
      print.order =
          "in " + std::to_string(blocks_.lanes) + " lanes of tiles of " + std::to_string(blocks_.rows) + " windows";
    for (const auto& file : files_)
      print.parts.push_back(fingerprint_of(file.bytes, max_fingerprint_blocks / static_cast<int>(files_.size())));
    return print;
  }

 private:
  void ensure_open() {
    std::call_once(opened_, [this] { open_all(); });
  }

  void open_all() {
    const hdf5::Lock lock;
    variables_.clear();  // drops what a failed attempt has opened
    files_.clear();
    schema_.clear();
    decoding_ = std::make_unique<ChunkDecoding>(options_.cache_bytes);
    for (const auto& path : paths_) {
      variables_.emplace_back(path, files_, *decoding_, variables_.empty() ? nullptr : &variables_.front());
      require_new_name(variables_.back().name());
    }
    const auto& first = variables_.front();
    shape_.emplace(options_, first.array().shape, first.dimension_names(), "opening windows of " + first.shown());
    for (const auto& variable : variables_) schema_.push_back(variable.column(*shape_));
    schema_.push_back({origin_name, at::kLong, {std::ssize(shape_->array)}});
    const auto tile = choose_tile();
    grid_.emplace(shape_->counts(), tile);
    if (options_.mask) apply_mask();
    count_ = valid_ ? std::ssize(*valid_) : grid_->size();
    share_memory(tile);
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

  /// Decides which variables are kept in memory whole, and makes blocks of tiles if another one must be decoded.
  void share_memory(const std::vector<std::int64_t>& tile) {
    auto left = static_cast<double>(std::max<std::int64_t>(0, options_.cache_bytes));
    blocks_ = {};
    in_tiles_.clear();
    double bytes = 0;
    for (auto& variable : variables_) {
      if (variable.reads_directly(*shape_)) continue;
      const auto all = variable.all_bytes();
      if (all <= left) {
        left -= all;
        variable.keep_in_memory();
        if (!variable.array().chunks) decoding_->cache.lower_limit(static_cast<std::size_t>(all));
      } else if (variable.array().chunks) {
        in_tiles_.push_back(&variable);
        bytes += variable.bytes_of_tile(*shape_, tile);
      }
    }
    if (in_tiles_.empty()) return;
    const auto share = static_cast<double>(count_) / static_cast<double>(grid_->size());
    blocks_.rows = std::max<std::int64_t>(1, std::llround(static_cast<double>(grid_->tile_size()) * share));
    blocks_.files = {count_};
    // Half of the memory: at the change from one tile to the next, both are needed.
    blocks_.lanes = static_cast<int>(std::clamp(left / bytes / 2, 1.0, 64.0));
  }

  /// Lists the windows in which enough values of the mask are neither 0 nor NaN.
  void apply_mask() {
    const WindowVariable mask(*options_.mask, files_, *decoding_, &variables_.front());
    auto shape = *shape_;
    std::ranges::fill(shape.margin, 0);
    // Windows at the same place along the dimensions of the mask are the same for it.
    std::vector<std::int64_t> places;
    std::int64_t number_of_places = 1;
    for (const auto d : mask.dimensions()) number_of_places *= places.emplace_back(shape.counts()[d]);
    std::vector<bool> is_valid(static_cast<std::size_t>(number_of_places));
    for (std::int64_t place = 0; place < number_of_places; ++place) {
      std::vector<std::int64_t> at(shape.array.size(), 0);
      auto rest = place;
      for (auto d = places.size(); d-- > 0; rest /= places[d]) at[mask.dimensions()[d]] = rest % places[d];
      const auto values = mask.read(WindowCoordinates(&at, 1), shape, pool_);
      const auto counted = values.ne(0).logical_and(values.eq(values)).sum().item<std::int64_t>();
      is_valid[static_cast<std::size_t>(place)] =
          static_cast<double>(counted) >= options_.mask_share * static_cast<double>(values.numel());
    }
    valid_.emplace();
    for (std::int64_t number = 0; number < grid_->size(); ++number) {
      const auto at = grid_->coordinates(number);
      std::int64_t place = 0;
      for (std::size_t d = 0; d < places.size(); ++d) place = place * places[d] + at[mask.dimensions()[d]];
      if (is_valid[static_cast<std::size_t>(place)]) valid_->push_back(number);
    }
    if (valid_->empty())
      throw Error(ExitCode::data, "opening windows of " + paths_.front(), "the mask leaves no window",
                  "Give another mask or a smaller mask_share");
  }

  std::vector<std::int64_t> coordinates(std::int64_t sample) const {
    return grid_->coordinates(valid_ ? (*valid_)[static_cast<std::size_t>(sample)] : sample);
  }

  std::vector<std::string> paths_;
  WindowOptions options_;
  std::once_flag opened_;
  std::unique_ptr<ChunkDecoding> decoding_;
  OpenFiles files_;
  std::deque<WindowVariable> variables_;
  std::optional<WindowShape> shape_;
  std::optional<WindowGrid> grid_;
  std::optional<std::vector<std::int64_t>> valid_;  ///< the numbers of the windows, if some are left out
  std::int64_t count_ = 0;
  Schema schema_;
  Blocks blocks_;
  std::vector<const WindowVariable*> in_tiles_;  ///< those whose chunks are read tile by tile
  TensorPool pool_;
};

}  // namespace

std::shared_ptr<Source> window_source(std::vector<std::string> variables, WindowOptions options) {
  return std::make_shared<WindowSource>(std::move(variables), std::move(options));
}

}  // namespace muster::detail::data
