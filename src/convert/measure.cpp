// Measures how fast a dataset is read as it lies and after the advised conversion, for `muster inspect --measure`.
#include "base/temporary.hpp"
#include "convert/convert.hpp"
#include "muster/dataset.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <utility>

namespace muster {
namespace {

constexpr double least_seconds = 1;             ///< how long one measurement takes at least, with opening the file
constexpr std::int64_t trial_bytes = 8 << 20;   ///< what the trial pass reads, which shows how fast passes are
constexpr std::int64_t part_bytes = 64 << 20;   ///< of the measured samples, at most, roughly
constexpr std::int64_t batch_bytes = 16 << 20;  ///< the most bytes of one batch, unless a sample is larger

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// A dataset, what describe_dataset() says of it, and the size of what is measured.
struct Measured {
  std::string path;
  Json description;
  std::vector<std::string> columns = {};
  std::int64_t samples = 0, sample_bytes = 0, batch = 0;
  std::function<void()> between;

  /// True if its samples are of different length.
  bool is_ragged() const { return !description.at("ragged").is_null(); }
  Dataset open() const {
    auto dataset = is_ragged() ? open_ragged() : Dataset::from_hdf5({path}, {.columns = columns});
    dataset.count();  // opens the file, which is not timed
    return dataset;
  }

 private:
  Dataset open_ragged() const {
    const auto& ragged = description.at("ragged");
    return Dataset::ragged(
        path, {.values = ragged.at("values"), .offsets = ragged.at("offsets"), .columns = ragged.at("columns")});
  }
};

/// The mean length of a sample if the samples have different lengths; 1 for other datasets.
double mean_length(const Measured& all) {
  if (!all.is_ragged()) return 1;
  const auto& ragged = all.description.at("ragged");
  const auto& columns = all.description.at("columns");
  const auto values = std::ranges::find_if(
      columns, [&](const Json& column) { return column.at("name") == ragged.at("values").front(); });
  return values->at("shape").front().get<double>() / ragged.at("samples").get<double>();
}

Measured open_measured(const std::string& path, const std::function<void()>& between) {
  Measured all{.path = path, .description = describe_dataset(path), .between = between};
  for (const auto& column : all.description.at("columns")) all.columns.push_back(column.at("name"));
  const auto dataset = all.open();
  const auto length = mean_length(all);
  double bytes = 0;
  for (const auto& column : dataset.schema()) {
    auto of_column = static_cast<double>(c10::elementSize(column.dtype));
    for (const auto size : column.shape) of_column *= size < 0 ? length : static_cast<double>(size);
    bytes += of_column;
  }
  all.sample_bytes = std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes));
  all.batch = std::clamp<std::int64_t>(batch_bytes / all.sample_bytes, 1, BatchOptions{}.batch_size);
  all.samples = dataset.count();
  return all;
}

/// True if a column is read by `reader`.
bool has_reader(const Measured& all, const char* reader) {
  return std::ranges::any_of(all.description.at("columns"),
                             [&](const Json& column) { return column.at("reader") == reader; });
}

/// True if the values that must be decoded or converted are kept after the first pass over the whole dataset.
bool keeps_values(const Measured& all) {
  const auto bytes = static_cast<double>(all.samples) * static_cast<double>(all.sample_bytes);
  return (has_reader(all, "decoded") || has_reader(all, "hdf5")) &&
         bytes <= static_cast<double>(DatasetOptions{}.cache_bytes);
}

/// The number of samples that have about `bytes` bytes, in whole chunks, since a chunk is decoded whole.
std::int64_t samples_of(const Measured& all, std::int64_t bytes) {
  // A column that HDF5 reads and that is kept in memory is read whole at its first sample.
  if (has_reader(all, "hdf5") && keeps_values(all)) return all.samples;
  std::int64_t rows = 1;
  for (const auto& column : all.description.at("columns"))
    if (const auto& chunk = column.at("chunk"); !chunk.is_null() && !all.is_ragged())
      rows = std::max(rows, std::min(all.samples, chunk.at(0).get<std::int64_t>()));
  const auto wanted = std::max<std::int64_t>(1, bytes / all.sample_bytes);
  return std::min((wanted + rows - 1) / rows * rows, all.samples);
}

/// The seconds of one pass over the first `samples` samples in a random order.
double seconds_of_pass(const Measured& all, const Dataset& dataset, std::int64_t samples) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(samples));
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, std::mt19937_64(1));
  const auto begin = Clock::now();
  for (std::int64_t at = 0; at < samples; at += all.batch) {
    const auto count = std::min(all.batch, samples - at);
    dataset.read(std::span(order).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(count)));
    if (all.between) all.between();
  }
  return seconds_since(begin);
}

/// How many of the samples are measured: about as many as a pass reads in a second, from 8 to 64 MiB.
std::int64_t choose_samples(const Measured& all) {
  const auto trial = samples_of(all, trial_bytes);
  seconds_of_pass(all, all.open(), trial);  // puts them into the system's cache
  const auto seconds = seconds_of_pass(all, all.open(), trial);
  const auto bytes = static_cast<double>(trial_bytes) * least_seconds / std::max(seconds, 1e-9);
  return samples_of(all, std::clamp(static_cast<std::int64_t>(std::min(bytes, 1e15)), trial_bytes, part_bytes));
}

/// Measures passes until a second is over. `open` returns the dataset for each pass.
template <class Open>
Json measure_passes(const Measured& all, std::int64_t samples, Open&& open) {
  const auto begin = Clock::now();
  double seconds = 0;
  std::int64_t passes = 0;
  for (; passes == 0 || seconds_since(begin) < least_seconds; ++passes)
    seconds += seconds_of_pass(all, open(), samples);
  const auto speed = static_cast<double>(passes * samples) / seconds;
  return {{"samples_per_s", speed}, {"bytes_per_s", speed * static_cast<double>(all.sample_bytes)}};
}

/// Measures first passes, and later passes if `keeps` is true, that is if they take values from memory.
Json measure_both(const Measured& all, std::int64_t samples, bool keeps) {
  const auto dataset = all.open();
  // Puts the file into the system's cache, and values into the dataset's, some only when they are read a second time.
  for (int pass = 0; pass < 2; ++pass) seconds_of_pass(all, dataset, samples);
  auto first = measure_passes(all, samples, [&] { return all.open(); });
  return {{"first_pass", std::move(first)},
          {"later_passes", keeps ? measure_passes(all, samples, [&] { return dataset; }) : Json()}};
}

/// Converts the first samples as advised, and measures the result.
Json measure_conversion(const Measured& all, std::int64_t samples) {
  const auto& advice = all.description.at("convert");
  const detail::TemporaryFolder folder("muster-inspect-");
  const auto output = folder.path() / "part.h5";
  ConvertOptions options{.columns = all.columns, .progress = [&](std::uint64_t, std::uint64_t) {
                           if (all.between) all.between();
                         }};
  if (!advice.at("chunk").is_null()) options.chunk = advice.at("chunk").get<std::int64_t>();
  if (!advice.at("compress").is_null()) options.compress = advice.at("compress").get<int>();
  detail::convert::copy_columns(all.path, output, options, samples);

  auto part = all;
  part.path = output.string();
  part.description = describe_dataset(part.path);
  return measure_both(part, samples, keeps_values(part));
}

}  // namespace

Json measure_dataset(const std::string& path, const std::function<void()>& between) {
  const auto all = open_measured(path, between);
  const auto samples = choose_samples(all);
  auto now = measure_both(all, samples, keeps_values(all));
  auto converted = all.description.at("convert").is_null() ? Json() : measure_conversion(all, samples);
  return {{"samples", samples},
          {"batch", all.batch},
          {"cache", "memory"},
          {"now", std::move(now)},
          {"converted", std::move(converted)}};
}

}  // namespace muster
