// A source of samples of different length: in each file, their values lie one after the other.
#include "base/number.hpp"
#include "data/sources/file_source.hpp"
#include "data/sources/ragged_file.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

namespace muster::detail::data {
namespace {

using Slots = std::vector<std::size_t>;

/// The places in a batch, sorted by the samples there: the values are read in the order of the files.
Slots slots_by_sample(std::span<const std::int64_t> samples) {
  Slots slots(samples.size());
  std::iota(slots.begin(), slots.end(), std::size_t{0});
  std::ranges::stable_sort(slots, {}, [&](std::size_t slot) { return samples[slot]; });
  return slots;
}

/// The samples of a batch that lie in one file, in the order of the file.
struct FilePart {
  RaggedFile& file;
  Slots slots;                        ///< their places in the batch
  std::vector<std::int64_t> samples;  ///< counted from 0 in the file
};

std::byte* begin_of(const at::Tensor& batch) { return static_cast<std::byte*>(batch.mutable_data_ptr()); }

class RaggedSource final : public FileSource {
 public:
  RaggedSource(const std::vector<std::string>& paths, RaggedOptions options)
      : FileSource(paths, options.cache_bytes), options_(std::move(options)) {
    prepare_to_open();
    const std::string doing = "making a dataset of samples of different length";
    if (options_.values.empty())
      throw Error(ExitCode::usage, doing, "no column of values is named", "Name one in RaggedOptions::values");
    if (options_.max_length.value_or(1) < 1)
      throw Error(ExitCode::usage, doing, "max_length is less than 1", "Give at least 1");
    auto names = options_.values;
    names.push_back(mask_name());
    names.insert(names.end(), options_.columns.begin(), options_.columns.end());
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
      throw Error(ExitCode::usage, doing, "there are two columns \"" + *twice + "\"",
                  "Choose each once; \"" + mask_name() + "\" is made by muster");
    for (const auto& path : paths_) files_.emplace_back(path);
  }

  std::shared_ptr<const Lengths> lengths() override {
    ensure_open();
    std::call_once(lengths_made_, [this] {
      std::vector<std::int64_t> lengths;
      lengths.reserve(static_cast<std::size_t>(count_));
      for (const auto& file : files_)
        for (std::int64_t sample = 0; sample < file.samples(); ++sample) lengths.push_back(file.length(sample));
      lengths_ = std::make_shared<Lengths>(std::move(lengths));
    });
    return lengths_;
  }

  Batch read(std::span<const std::int64_t> samples) override {
    ensure_open();
    const auto parts = parts_of(samples);
    std::vector<std::int64_t> lengths(samples.size());
    for (const auto& [file, slots, in_file] : parts)
      for (std::size_t i = 0; i < slots.size(); ++i) lengths[slots[i]] = length_of(file, in_file[i]);
    const auto longest = lengths.empty() ? 0 : std::ranges::max(lengths);
    std::vector<Batch::Item> items;
    for (std::size_t c = 0; c < options_.values.size(); ++c)
      items.emplace_back(options_.values[c], read_values(c, parts, lengths, longest));
    items.emplace_back(mask_name(), mask_of(lengths, longest));
    for (std::size_t c = 0; c < options_.columns.size(); ++c)
      items.emplace_back(options_.columns[c], read_rows(c, parts, std::ssize(samples)));
    return Batch(std::move(items));
  }

 private:
  std::string mask_name() const { return options_.values.front() + "_mask"; }

  /// How many values of a sample of the file are read.
  std::int64_t length_of(const RaggedFile& file, std::int64_t sample) const {
    return options_.max_length ? std::min(file.length(sample), *options_.max_length) : file.length(sample);
  }

  void open_all() override {
    const hdf5::Lock lock;
    for (auto& file : files_) {
      file = RaggedFile(file.path + ":" + file.group);  // drops what a failed attempt has opened
      file.open(options_, *decoding_);
      add_file(file, schema_of_file(file), file.samples());
    }
    share_memory();
  }

  Schema schema_of_file(const RaggedFile& file) const {
    Schema schema;
    for (const auto& each : file.values) {
      auto column = each.column();
      column.shape.insert(column.shape.begin(), -1);
      schema.push_back(std::move(column));
    }
    schema.push_back({mask_name(), at::kBool, {-1}});
    for (const auto& column : file.columns) schema.push_back(column.column());
    return schema;
  }

  /// Has the columns that HDF5 reads kept in memory whole if they fit. The first one that does not fit gets the rest
  /// for its chunks.
  void share_memory() {
    for (auto& file : files_)
      for (auto* const columns : {&file.values, &file.columns})
        for (auto& column : *columns) {
          auto* const library = column.library();
          if (library == nullptr || keep_whole(library, column.all_bytes())) continue;
          const auto rest = static_cast<std::size_t>(std::exchange(memory_left_, 0));
          if (column.blocks().rows > 0) library->keep_chunks(file.handle.get(), column.blocks().slots, rest);
          decoding_->cache.lower_limit(rest);
        }
  }

  std::vector<FilePart> parts_of(std::span<const std::int64_t> samples) {
    std::vector<FilePart> parts;
    for (const auto slot : slots_by_sample(samples)) {
      const auto sample = samples[slot];
      if (parts.empty() || sample >= parts.back().file.first + parts.back().file.samples())
        parts.push_back({*(std::ranges::upper_bound(files_, sample, {}, &RaggedFile::first) - 1), {}, {}});
      parts.back().slots.push_back(slot);
      parts.back().samples.push_back(sample - parts.back().file.first);
    }
    return parts;
  }

  /// [rows, longest, …], padded. `lengths`: of the batch's samples.
  at::Tensor read_values(std::size_t c, const std::vector<FilePart>& parts, const std::vector<std::int64_t>& lengths,
                         std::int64_t longest) {
    const auto row_bytes = files_.front().values[c].row_bytes();
    const auto doing = "reading " + shown();
    const auto sample_bytes = checked_product(longest, row_bytes, doing, "the longest sample of a batch");
    static_cast<void>(checked_product(std::max<std::int64_t>(1, sample_bytes), std::ssize(lengths), doing,
                                      "a batch of padded samples"));
    auto shape = schema_[c].shape;
    shape.front() = longest;
    shape.insert(shape.begin(), std::ssize(lengths));
    auto batch = pool_.take(shape, schema_[c].dtype);
    for (std::size_t slot = 0; slot < lengths.size(); ++slot)
      if (const auto length = lengths[slot]; length < longest)
        batch.select(0, static_cast<std::int64_t>(slot)).narrow(0, length, longest - length).fill_(options_.padding);
    const auto place = [&](std::size_t slot) {
      return begin_of(batch) + static_cast<std::int64_t>(slot) * sample_bytes;
    };
    for (const auto& [file, slots, samples] : parts) {
      std::vector<RowDestination> wanted;
      std::vector<std::pair<std::size_t, std::size_t>> copies;  // a sample that comes again, and where it was first
      for (std::size_t i = 0, first = 0; i < slots.size(); ++i) {
        if (i > 0 && samples[i] == samples[first]) {
          copies.emplace_back(slots[i], slots[first]);
          continue;
        }
        first = i;
        for (std::int64_t row = 0; row < lengths[slots[i]]; ++row)
          wanted.push_back({file.first_value(samples[i]) + row, place(slots[i]) + row * row_bytes});
      }
      file.values[c].read(*file.bytes, wanted);
      for (const auto& [slot, source] : copies)
        std::memcpy(place(slot), place(source), static_cast<std::size_t>(lengths[slot] * row_bytes));
    }
    return batch;
  }

  at::Tensor read_rows(std::size_t c, const std::vector<FilePart>& parts, std::int64_t rows) {
    const auto& column = files_.front().columns[c];
    auto shape = column.column().shape;
    shape.insert(shape.begin(), rows);
    auto batch = pool_.take(shape, column.column().dtype);
    for (const auto& [file, slots, samples] : parts) {
      std::vector<RowDestination> wanted;
      for (std::size_t i = 0; i < slots.size(); ++i)
        wanted.push_back({samples[i], begin_of(batch) + static_cast<std::int64_t>(slots[i]) * column.row_bytes()});
      file.columns[c].read(*file.bytes, wanted);
    }
    return batch;
  }

  /// [rows, longest], true where a value is real.
  at::Tensor mask_of(const std::vector<std::int64_t>& lengths, std::int64_t longest) {
    auto mask = pool_.take({std::ssize(lengths), longest}, at::kBool);
    auto* next = mask.mutable_data_ptr<bool>();
    for (const auto length : lengths) {
      next = std::fill_n(next, length, true);
      next = std::fill_n(next, longest - length, false);
    }
    return mask;
  }

  const RaggedOptions options_;
  std::once_flag lengths_made_;
  std::vector<RaggedFile> files_;
  std::shared_ptr<const Lengths> lengths_;
};

}  // namespace

std::shared_ptr<Source> ragged_source(const std::vector<std::string>& paths, RaggedOptions options) {
  return std::make_shared<RaggedSource>(paths, std::move(options));
}

}  // namespace muster::detail::data
