#include "data/sources/file_set.hpp"
#include "data/sources/hdf5_column.hpp"
#include "data/sources/scattered_read.hpp"
#include "data/sources/source.hpp"
#include "hdf5/file.hpp"

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>

namespace muster::detail::data {
namespace {

/// One file of the dataset.
struct SourceFile : hdf5::GroupPath {
  using GroupPath::GroupPath;
  std::int64_t rows() const noexcept { return columns.front().rows(); }

  std::int64_t first = 0;  ///< its first sample in the dataset
  std::optional<File> bytes;
  hdf5::Handle handle;
  std::vector<Hdf5Column> columns;  ///< closed before the file
};

void open(SourceFile& file, std::vector<std::string> names, ChunkDecoding& decoding) {
  const auto doing = "opening " + file.path;
  file.handle = hdf5::open_file(file.path);
  file.bytes.emplace(open_for_pieces(file.path));
  const auto group = hdf5::open_group(file.handle.get(), file.group, file.path);
  if (names.empty()) {
    names = hdf5::list(group.get());
    std::erase_if(names, [&](const auto& name) { return !hdf5::is_column(group.get(), name, file.shown(name)); });
    if (names.empty())
      throw Error(ExitCode::data, doing, "group \"" + file.group + "\" holds no datasets",
                  "Name the group as FILE.h5:/group; `muster inspect` lists what the file holds");
  }
  for (const auto& name : names)
    file.columns.emplace_back(name, open_array(group.get(), *file.bytes, name, file.shown(name), decoding));
  if (std::ranges::any_of(file.columns, [&](const auto& column) { return column.rows() != file.rows(); }))
    throw Error(
        ExitCode::data, doing,
        "its columns are of different length (" +
            joined(file.columns,
                   [](const Hdf5Column& each) { return each.column().name + ": " + std::to_string(each.rows()); }) +
            ")",
        "Choose columns of the same length, or read samples of different length with Dataset::ragged");
  if (file.rows() == 0) throw Error(ExitCode::data, doing, "it has no samples", "Name a file that has some");
  if (std::ranges::none_of(file.columns, &Hdf5Column::needs_hdf5)) file.handle = {};
}

class Hdf5Source final : public Source {
 public:
  Hdf5Source(std::vector<std::string> paths, DatasetOptions options) : options_(std::move(options)) {
    prepare_to_open(paths);
    auto sorted = options_.columns;
    std::ranges::sort(sorted);
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
      throw Error(ExitCode::data, "making a dataset", "column \"" + *twice + "\" is chosen twice", "Choose it once");
    for (const auto& path : paths) files_.emplace_back(path);
  }

  std::int64_t count() override {
    ensure_open();
    return count_;
  }
  const Schema& schema() override {
    ensure_open();
    return schema_;
  }
  bool has_column_order() const noexcept override { return !options_.columns.empty(); }
  std::string shown() const override { return shown_files(files_.front().path, files_.size()); }
  std::vector<std::string> files() const override {
    std::vector<std::string> paths;
    for (const auto& file : files_) paths.push_back(file.path);
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
    std::vector<Batch::Item> items;
    for (const auto& column : schema_) {
      auto shape = column.shape;
      shape.insert(shape.begin(), static_cast<std::int64_t>(samples.size()));
      items.emplace_back(column.name, pool_.take(shape, column.dtype));
    }
    // The samples are read in the order of the files, whatever their order in the batch.
    std::vector<std::size_t> slots(samples.size());
    std::iota(slots.begin(), slots.end(), std::size_t{0});
    std::ranges::sort(slots, {}, [&](std::size_t slot) { return samples[slot]; });

    std::vector<RowDestination> wanted;
    auto file = files_.begin();
    for (auto next = slots.begin(); next != slots.end();) {
      while (samples[*next] >= file->first + file->rows()) ++file;
      const auto beyond = file->first + file->rows();
      const auto end = std::find_if(next, slots.end(), [&](std::size_t slot) { return samples[slot] >= beyond; });
      for (std::size_t c = 0; c < items.size(); ++c) {
        auto* const base = static_cast<std::byte*>(items[c].second.mutable_data_ptr());
        wanted.clear();
        for (auto slot = next; slot != end; ++slot)
          wanted.push_back(
              {samples[*slot] - file->first, base + static_cast<std::int64_t>(*slot) * file->columns[c].row_bytes()});
        file->columns[c].read(*file->bytes, wanted);
      }
      next = end;
    }
    return Batch(std::move(items));
  }

  void expect(std::span<const std::int64_t> samples, Ahead how) override {
    ensure_open();
    if (blocks_.rows == 0) return;  // a pass in lanes may be resumed where all values fit into memory
    std::vector<std::int64_t> sorted(samples.begin(), samples.end());
    std::ranges::sort(sorted);
    std::vector<RowRange> rows;
    // All blocks of a file at once, so that the threads that decode share them.
    for (auto next = sorted.begin(); next != sorted.end(); rows.clear()) {
      auto& file = *(std::ranges::upper_bound(files_, *next, {}, &SourceFile::first) - 1);
      for (; next != sorted.end() && *next < file.first + file.rows(); ++next) {
        const auto first = (*next - file.first) / blocks_.rows * blocks_.rows;
        rows.push_back({first, std::min(first + blocks_.rows, file.rows()) - 1});
      }
      for (auto& column : file.columns) column.expect(*file.bytes, rows, how);
    }
  }

  DatasetFingerprint fingerprint() override {
    ensure_open();
    DatasetFingerprint print{.count = count_, .schema = schema_text(schema_)};
    if (blocks_.rows > 0)
      print.order =
          "in " + std::to_string(blocks_.lanes) + " lanes of chunks of " + std::to_string(blocks_.rows) + " samples";
    for (const auto& file : files_)
      print.parts.push_back(fingerprint_of(*file.bytes, max_fingerprint_blocks / static_cast<int>(files_.size())));
    return print;
  }

 private:
  void ensure_open() {
    std::call_once(opened_, [this] { open_all(); });
  }

  void open_all() {
    const hdf5::Lock lock;
    decoding_ = std::make_unique<ChunkDecoding>(options_.cache_bytes);
    count_ = 0;
    for (auto& file : files_) {
      file = SourceFile(file.path + ":" + file.group);  // drops what a failed attempt has opened
      data::open(file, options_.columns, *decoding_);
      Schema schema;
      for (const auto& column : file.columns) schema.push_back(column.column());
      if (&file == &files_.front()) schema_ = schema;
      require_same_schema(schema, file, schema_, files_.front());
      file.first = count_;
      add_samples(count_, file.rows(), file.path);
    }
    share_memory();
  }

  /// Decides which columns are kept in memory whole, and divides the samples into blocks of the size of a chunk if a
  /// column with chunks is not.
  void share_memory() {
    auto left = static_cast<double>(std::max<std::int64_t>(0, options_.cache_bytes));
    blocks_ = {};
    double block_bytes = 0;  // the largest of the files
    std::vector<std::vector<Hdf5Column*>> in_blocks(files_.size());
    for (std::size_t i = 0; i < files_.size(); ++i) {
      blocks_.files.push_back(files_[i].rows());
      for (auto& column : files_[i].columns) {
        if (!column.needs_memory()) continue;
        if (column.all_bytes() > left) {
          if (column.blocks().rows > 0) in_blocks[i].push_back(&column);
          continue;
        }
        left -= column.all_bytes();
        if (auto* const library = column.library()) {
          library->keep_in_memory();
          decoding_->cache.lower_limit(static_cast<std::size_t>(column.all_bytes()));
        }
      }
      for (const auto* column : in_blocks[i]) blocks_.rows = std::max(blocks_.rows, column->blocks().rows);
      block_bytes = std::max(block_bytes, sum_of_block_bytes(in_blocks[i]));
    }
    if (blocks_.rows == 0) return;
    // Half of the memory: at the change from one block to the next, both are needed.
    blocks_.lanes = static_cast<int>(std::clamp(left / block_bytes / 2, 1.0, 64.0));
    double file_bytes = 0;
    for (const auto& file : files_) file_bytes += static_cast<double>(file.bytes->size());
    decoding_->read_directly_beyond_memory(file_bytes, options_.cache_bytes);
    for (std::size_t i = 0; i < files_.size(); ++i) share_among_library_columns(files_[i], in_blocks[i], left);
  }

  /// Gives the columns that HDF5 reads their part of `bytes`: that of the file, by the sizes of the columns' blocks.
  void share_among_library_columns(SourceFile& file, const std::vector<Hdf5Column*>& in_blocks, double bytes) {
    if (std::ranges::none_of(in_blocks, &Hdf5Column::library)) return;
    const auto of_file = bytes / static_cast<double>(files_.size());
    // HDF5 keeps chunks as the first handle of a dataset says, and two columns may be fields of one dataset.
    for (auto* const column : in_blocks)
      if (column->library() != nullptr) column->library()->close();
    for (auto* const column : in_blocks) {
      if (column->library() == nullptr) continue;
      const auto part = static_cast<std::size_t>(of_file * (column->blocks().bytes / sum_of_block_bytes(in_blocks)));
      column->library()->keep_chunks(file.handle.get(), column->blocks().slots, part);
      decoding_->cache.lower_limit(part);
    }
  }
  static double sum_of_block_bytes(const std::vector<Hdf5Column*>& columns) {
    double bytes = 0;
    for (const auto* column : columns) bytes += column->blocks().bytes;
    return bytes;
  }

  DatasetOptions options_;
  std::once_flag opened_;
  std::unique_ptr<ChunkDecoding> decoding_;
  std::vector<SourceFile> files_;
  std::int64_t count_ = 0;
  Schema schema_;
  Blocks blocks_;
  TensorPool pool_;
};

}  // namespace

std::shared_ptr<Source> hdf5_source(std::vector<std::string> paths, DatasetOptions options) {
  return std::make_shared<Hdf5Source>(std::move(paths), std::move(options));
}

}  // namespace muster::detail::data
