// A source of samples of different length: their values lie one after the other.
#include "base/number.hpp"
#include "data/sources/hdf5_column.hpp"
#include "data/sources/ragged_offsets.hpp"
#include "data/sources/source.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

namespace muster::detail::data {
namespace {

/// True if a tensor of this type can hold `number`.
bool holds(at::ScalarType type, const at::Scalar& number) {
  if (at::isFloatingType(type) || at::isComplexType(type)) return !number.isComplex() || at::isComplexType(type);
  if (!number.isIntegral(/*includeBool=*/true)) return false;
  try {
    return at::empty({}, type).fill_(number).item().toLong() == number.toLong();
  } catch (const std::exception&) {  // it overflows
    return false;
  }
}

using Slots = std::vector<std::size_t>;

/// The places in a batch, by the sample there: the values are read in the order of the file.
Slots slots_by_sample(std::span<const std::int64_t> samples) {
  Slots slots(samples.size());
  std::iota(slots.begin(), slots.end(), std::size_t{0});
  std::ranges::stable_sort(slots, {}, [&](std::size_t slot) { return samples[slot]; });
  return slots;
}

class RaggedSource final : public Source {
 public:
  RaggedSource(const std::string& path, RaggedOptions options) : place_(path), options_(std::move(options)) {
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
  }

  std::int64_t count() override {
    ensure_open();
    return static_cast<std::int64_t>(offsets_.size()) - 1;
  }
  const Schema& schema() override {
    ensure_open();
    return schema_;
  }
  std::string shown() const override { return place_.path; }
  NodeChunks* node_chunks() override {
    ensure_open();
    return decoding_->shareable();
  }

  std::shared_ptr<const Lengths> lengths() override {
    ensure_open();
    std::call_once(lengths_made_, [this] {
      std::vector<std::int64_t> lengths(offsets_.size());
      std::adjacent_difference(offsets_.begin(), offsets_.end(), lengths.begin());
      lengths.erase(lengths.begin());
      lengths_ = std::make_shared<Lengths>(std::move(lengths));
    });
    return lengths_;
  }

  Batch read(std::span<const std::int64_t> samples) override {
    ensure_open();
    const auto slots = slots_by_sample(samples);
    std::int64_t longest = 0;
    for (const auto sample : samples) longest = std::max(longest, length_of(sample));
    std::vector<Batch::Item> items;
    for (auto& column : values_) items.emplace_back(column.column().name, read_values(column, samples, slots, longest));
    items.emplace_back(mask_name(), mask_of(samples, longest));
    for (auto& column : columns_) items.emplace_back(column.column().name, read_rows(column, samples, slots));
    return Batch(std::move(items));
  }

  DatasetFingerprint fingerprint() override {
    ensure_open();
    return {
        .count = count(), .schema = schema_text(schema_), .parts = {fingerprint_of(*bytes_, max_fingerprint_blocks)}};
  }

 private:
  std::string mask_name() const { return options_.values.front() + "_mask"; }

  std::int64_t first_of(std::int64_t sample) const { return offsets_[static_cast<std::size_t>(sample)]; }
  std::int64_t length_of(std::int64_t sample) const {
    const auto all = first_of(sample + 1) - first_of(sample);
    return options_.max_length ? std::min(all, *options_.max_length) : all;
  }

  void ensure_open() {
    std::call_once(opened_, [this] { open_all(); });
  }

  void open_all() {
    const hdf5::Lock lock;
    values_.clear();  // drops what a failed attempt has opened
    columns_.clear();
    schema_.clear();
    decoding_ = std::make_unique<ChunkDecoding>(options_.cache_bytes);
    handle_ = hdf5::open_file(place_.path);
    bytes_.emplace(place_.path, File::Mode::read);
    const auto group = hdf5::open_group(handle_.get(), place_.group, place_.path);
    const auto open = [&](const std::string& name, ChunkDecoding& decoding) {
      return Hdf5Column(name, open_array(group.get(), *bytes_, name, place_.shown(name), decoding));
    };
    for (const auto& name : options_.values) values_.push_back(open(name, *decoding_));
    for (const auto& column : values_) check_values(column);
    {
      ChunkDecoding decoding(options_.cache_bytes);  // keeps chunks by the column's address, so it goes with it
      auto offsets = open(options_.offsets, decoding);
      offsets_ = read_offsets(offsets, *bytes_, values_.front().rows(), place_.shown(options_.offsets));
    }
    for (const auto& name : options_.columns) columns_.push_back(open(name, *decoding_));
    for (const auto& column : columns_) check_rows(column);
    make_schema();
    share_memory();
  }

  void check_values(const Hdf5Column& column) const {
    const auto doing = "opening " + place_.shown(column.column().name);
    if (column.rows() != values_.front().rows())
      throw Error(ExitCode::data, doing,
                  "it has " + std::to_string(column.rows()) + " values, and \"" + options_.values.front() + "\" has " +
                      std::to_string(values_.front().rows()),
                  "Name columns of values with the same offsets");
    if (!holds(column.column().dtype, options_.padding))
      throw Error(
          ExitCode::usage, doing,
          "its type, " + std::string(c10::toString(column.column().dtype)) + ", cannot hold RaggedOptions::padding",
          "Give a number of that type");
  }
  void check_rows(const Hdf5Column& column) const {
    const auto count = static_cast<std::int64_t>(offsets_.size()) - 1;
    if (column.rows() != count)
      throw Error(ExitCode::data, "opening " + place_.shown(column.column().name),
                  "it has " + std::to_string(column.rows()) + " rows, and the offsets are those of " +
                      std::to_string(count) + " samples",
                  "Name columns with a row for each sample");
  }

  void make_schema() {
    for (const auto& each : values_) {
      auto column = each.column();
      column.shape.insert(column.shape.begin(), -1);
      schema_.push_back(std::move(column));
    }
    schema_.push_back({mask_name(), at::kBool, {-1}});
    for (const auto& column : columns_) schema_.push_back(column.column());
  }

  /// Has the columns that HDF5 reads kept in memory whole if they fit. The first one that does not fit gets the rest
  /// for its chunks.
  void share_memory() {
    auto left = static_cast<double>(std::max<std::int64_t>(0, options_.cache_bytes));
    for (auto* const columns : {&values_, &columns_})
      for (auto& column : *columns) {
        auto* const library = column.library();
        if (library == nullptr) continue;
        const auto bytes = std::min(column.all_bytes(), left);
        if (bytes == column.all_bytes())
          library->keep_in_memory();
        else if (column.blocks().rows > 0)
          library->keep_chunks(handle_.get(), column.blocks().slots, static_cast<std::size_t>(bytes));
        left -= bytes;
        decoding_->cache.lower_limit(static_cast<std::size_t>(bytes));
      }
  }

  /// [rows, longest, …], padded.
  at::Tensor read_values(Hdf5Column& column, std::span<const std::int64_t> samples, const Slots& slots,
                         std::int64_t longest) {
    const auto sample_bytes =
        checked_product(longest, column.row_bytes(), "reading " + place_.path, "the longest sample of a batch");
    static_cast<void>(checked_product(std::max<std::int64_t>(1, sample_bytes), std::ssize(samples),
                                      "reading " + place_.path, "a batch of padded samples"));
    auto shape = column.column().shape;
    shape.insert(shape.begin(), {std::ssize(samples), longest});
    auto batch = pool_.take(shape, column.column().dtype);
    auto* const begin = static_cast<std::byte*>(batch.mutable_data_ptr());
    const auto place = [&](std::size_t slot) { return begin + static_cast<std::int64_t>(slot) * sample_bytes; };
    std::vector<RowDestination> wanted;
    std::vector<std::pair<std::size_t, std::size_t>> copies;  // a sample that comes again, and where it was first
    std::size_t first = 0;
    for (const auto slot : slots) {
      const auto length = length_of(samples[slot]);
      if (length < longest)
        batch.select(0, static_cast<std::int64_t>(slot)).narrow(0, length, longest - length).fill_(options_.padding);
      if (slot != slots.front() && samples[slot] == samples[first]) {
        copies.emplace_back(slot, first);
        continue;
      }
      first = slot;
      for (std::int64_t row = 0; row < length; ++row)
        wanted.push_back({first_of(samples[slot]) + row, place(slot) + row * column.row_bytes()});
    }
    column.read(*bytes_, wanted);
    for (const auto& [slot, source] : copies)
      std::memcpy(place(slot), place(source), static_cast<std::size_t>(length_of(samples[slot]) * column.row_bytes()));
    return batch;
  }

  at::Tensor read_rows(Hdf5Column& column, std::span<const std::int64_t> samples, const Slots& slots) {
    auto shape = column.column().shape;
    shape.insert(shape.begin(), std::ssize(samples));
    auto batch = pool_.take(shape, column.column().dtype);
    auto* const begin = static_cast<std::byte*>(batch.mutable_data_ptr());
    std::vector<RowDestination> wanted;
    for (const auto slot : slots)
      wanted.push_back({samples[slot], begin + static_cast<std::int64_t>(slot) * column.row_bytes()});
    column.read(*bytes_, wanted);
    return batch;
  }

  /// [rows, longest], true where a value is real.
  at::Tensor mask_of(std::span<const std::int64_t> samples, std::int64_t longest) {
    auto mask = pool_.take({std::ssize(samples), longest}, at::kBool);
    auto* next = mask.mutable_data_ptr<bool>();
    for (const auto sample : samples) {
      next = std::fill_n(next, length_of(sample), true);
      next = std::fill_n(next, longest - length_of(sample), false);
    }
    return mask;
  }

  const hdf5::GroupPath place_;
  const RaggedOptions options_;
  std::once_flag opened_, lengths_made_;
  std::unique_ptr<ChunkDecoding> decoding_;
  std::optional<File> bytes_;
  hdf5::Handle handle_;
  std::vector<Hdf5Column> values_, columns_;  ///< closed before the file
  std::vector<std::int64_t> offsets_;
  std::shared_ptr<const Lengths> lengths_;
  Schema schema_;
  TensorPool pool_;
};

}  // namespace

std::shared_ptr<Source> ragged_source(const std::string& path, RaggedOptions options) {
  return std::make_shared<RaggedSource>(path, std::move(options));
}

}  // namespace muster::detail::data
