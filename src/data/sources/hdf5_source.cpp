#include "base/text.hpp"
#include "data/sources/file_source.hpp"
#include "data/sources/hdf5_column.hpp"
#include "data/sources/scattered_read.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"
#include "zarr/open_file.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

namespace muster::detail::data {
namespace {

/// One file of the dataset.
struct SourceFile : DataFile {
  using DataFile::DataFile;
  std::int64_t rows() const noexcept { return columns.front().rows(); }

  std::vector<Hdf5Column> columns;  ///< closed before the file
};

void open(SourceFile& file, std::vector<std::string> names, ChunkDecoding& decoding) {
  const auto doing = "opening " + file.path;
  file.handle = zarr::open_file(file.path);
  file.bytes.emplace(open_for_pieces(zarr::main_file(file.path)));
  const auto group = hdf5::open_group(file.handle.get(), file.group, file.path);
  if (names.empty()) names = hdf5::columns_of(group.get(), file);
  for (const auto& name : names)
    file.columns.emplace_back(name, open_array(group.get(), *file.bytes, name, file.shown(name), decoding));
  if (std::ranges::any_of(file.columns, [&](const auto& column) { return column.rows() != file.rows(); }))
    throw Error(
        ExitCode::data, doing,
        "its columns are of different length (" +
            joined(file.columns, [](const Hdf5Column& each) { return str(each.column().name, ": ", each.rows()); }) +
            ")",
        "Choose columns of the same length, or read samples of different length with Dataset::ragged");
  if (file.rows() == 0) throw Error(ExitCode::data, doing, "it has no samples", "Name a file that has some");
  if (std::ranges::none_of(file.columns, &Hdf5Column::needs_hdf5)) file.handle = {};
}

class Hdf5Source final : public FileSource {
 public:
  Hdf5Source(std::vector<std::string> paths, DatasetOptions options)
      : FileSource(std::move(paths), options.cache_bytes), options_(std::move(options)) {
    prepare_to_open();
    auto sorted = options_.columns;
    std::ranges::sort(sorted);
    if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end())
      throw Error(ExitCode::data, "making a dataset", "column \"" + *twice + "\" is chosen twice", "Choose it once");
    for (const auto& path : paths_) files_.emplace_back(path);
  }

  bool has_column_order() const noexcept override { return !options_.columns.empty(); }

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

 private:
  void open_all() override {
    const hdf5::Lock lock;
    for (auto& file : files_) {
      file = SourceFile(file.path + ":" + file.group);  // drops what a failed attempt has opened
      data::open(file, options_.columns, *decoding_);
      Schema schema;
      for (const auto& column : file.columns) schema.push_back(column.column());
      add_file(file, schema, file.rows());
    }
    share_memory();
  }

  /// Decides which columns are kept in memory whole, and divides the samples into blocks of the size of a chunk if a
  /// column with chunks is not kept whole.
  void share_memory() {
    double block_bytes = 0;  // the largest of the files
    std::vector<std::vector<ArrayInBlocks>> in_blocks(files_.size());
    for (std::size_t i = 0; i < files_.size(); ++i) {
      auto& file = files_[i];
      blocks_.files.push_back(file.rows());
      double of_file = 0;
      for (auto& column : file.columns) {
        const auto& blocks = column.blocks();
        if (!column.needs_memory() || keep_whole(column.library(), column.all_bytes()) || blocks.rows == 0) continue;
        in_blocks[i].push_back({column.library(), file.handle.get(), blocks.bytes, blocks.slots});
        blocks_.rows = std::max(blocks_.rows, blocks.rows);
        of_file += blocks.bytes;
      }
      block_bytes = std::max(block_bytes, of_file);
    }
    if (blocks_.rows == 0) return;
    choose_lanes(block_bytes);
    for (const auto& arrays : in_blocks) keep_chunks(arrays, memory_left_ / static_cast<double>(files_.size()));
  }

  DatasetOptions options_;
  std::vector<SourceFile> files_;
};

}  // namespace

std::shared_ptr<Source> hdf5_source(std::vector<std::string> paths, DatasetOptions options) {
  return std::make_shared<Hdf5Source>(std::move(paths), std::move(options));
}

}  // namespace muster::detail::data
