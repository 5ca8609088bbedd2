#include "data/sources/source.hpp"
#include "data/sources/window_grid.hpp"
#include "data/sources/window_mask.hpp"
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
  std::vector<std::string> files() const override {
    std::vector<std::string> paths;
    for (const auto& path : paths_) paths.push_back(hdf5::GroupPath(path).path);
    return paths;
  }
  Blocks blocks() override {
    ensure_open();
    return blocks_;
  }
  NodeChunks* node_chunks() override {
    ensure_open();
    return blocks_.rows == 0 ? decoding_->shareable() : nullptr;
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
    open_variables();
    if (options_.mask) apply_mask();
    count_ = left_ ? left_->size() : grid_->size();
    const hdf5::Lock lock;
    share_memory();
  }

  void open_variables() {
    const hdf5::Lock lock;
    variables_.clear();  // drops what a failed attempt has opened
    files_.clear();
    schema_.clear();
    left_.reset();
    decoding_ = std::make_unique<ChunkDecoding>(options_.cache_bytes);
    for (const auto& path : paths_) {
      variables_.emplace_back(path, files_, *decoding_, variables_.empty() ? nullptr : &variables_.front());
      require_new_name(variables_.back().name());
    }
    const auto& first = variables_.front();
    shape_.emplace(options_, first.array().shape, first.dimension_names(), "opening windows of " + first.shown());
    for (const auto& variable : variables_) schema_.push_back(variable.column(*shape_));
    schema_.push_back({origin_name, at::kLong, {std::ssize(shape_->array)}});
    tile_ = choose_tile();
    grid_.emplace(shape_->counts(), tile_);
  }

  /// Without HDF5's lock, since this may take long.
  void apply_mask() {
    ChunkDecoding decoding(options_.cache_bytes);
    const WindowVariable mask(*options_.mask, files_, decoding, &variables_.front());
    left_ = windows_of_mask(mask, options_.mask_share, *shape_, *grid_);
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

  /// Decides which variables are kept in memory whole, and makes blocks of tiles if another one must be decoded.
  void share_memory() {
    auto left = static_cast<double>(std::max<std::int64_t>(0, options_.cache_bytes));
    blocks_ = {};
    in_tiles_.clear();
    double bytes = 0;
    for (auto& variable : variables_) {
      if (variable.reads_directly(*shape_)) continue;
      const auto all = variable.all_bytes();
      if (all <= left) {
        left -= all;
        if (auto* const library = variable.library()) {
          library->keep_in_memory();
          decoding_->cache.lower_limit(static_cast<std::size_t>(all));
        }
      } else if (!variable.array().chunk.empty()) {
        in_tiles_.push_back(&variable);
        bytes += variable.bytes_of_tile(*shape_, tile_);
      }
    }
    if (in_tiles_.empty()) return;
    if (left_) bytes *= 2;  // with a mask, a block may begin inside of a tile
    const auto share = static_cast<double>(count_) / static_cast<double>(grid_->size());
    blocks_.rows = std::max<std::int64_t>(1, std::llround(static_cast<double>(grid_->tile_size()) * share));
    blocks_.files = {count_};
    // Half of the memory: at the change from one tile to the next, both are needed.
    blocks_.lanes = static_cast<int>(std::clamp(left / bytes / 2, 1.0, 64.0));
    double file_bytes = 0;
    for (const auto& file : files_) file_bytes += static_cast<double>(file.bytes.size());
    decoding_->read_directly_beyond_memory(file_bytes, options_.cache_bytes);
    share_among_library_variables(left);
  }

  /// Gives the variables that HDF5 reads their part of `bytes`, by the size of a tile.
  void share_among_library_variables(double bytes) {
    double of_tiles = 0;
    for (const auto* variable : in_tiles_) of_tiles += variable->bytes_of_tile(*shape_, tile_);
    // HDF5 keeps chunks as the first handle of a dataset says, and two variables may be fields of one dataset.
    for (auto* variable : in_tiles_)
      if (auto* const library = variable->library()) library->close();
    for (auto* variable : in_tiles_) {
      auto* const library = variable->library();
      if (library == nullptr) continue;
      const auto part = static_cast<std::size_t>(bytes * variable->bytes_of_tile(*shape_, tile_) / of_tiles);
      library->keep_chunks(variable->file(), variable->array().chunk_slots(), part);
      decoding_->cache.lower_limit(part);
    }
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

  std::vector<std::string> paths_;
  WindowOptions options_;
  std::once_flag opened_;
  std::unique_ptr<ChunkDecoding> decoding_;
  OpenFiles files_;
  std::deque<WindowVariable> variables_;
  std::optional<WindowShape> shape_;
  std::optional<WindowGrid> grid_;
  std::vector<std::int64_t> tile_;  ///< the windows of a tile along each dimension
  std::optional<NumberSet> left_;   ///< the windows that the mask leaves
  std::int64_t count_ = 0;
  Schema schema_;
  Blocks blocks_;
  std::vector<WindowVariable*> in_tiles_;  ///< those whose chunks are read tile by tile
  TensorPool pool_;
};

}  // namespace

std::shared_ptr<Source> window_source(std::vector<std::string> variables, WindowOptions options) {
  return std::make_shared<WindowSource>(std::move(variables), std::move(options));
}

}  // namespace muster::detail::data
