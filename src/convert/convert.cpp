#include "convert/convert.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "convert/dataset_writer.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>
#include <random>
#include <set>
#include <unordered_map>
#include <utility>

namespace muster::detail::convert {
namespace {

constexpr std::int64_t write_bytes = 8 << 20;       ///< bytes of one write, roughly
constexpr std::int64_t most_at_once = 1 << 20;      ///< samples of one write
constexpr std::int64_t gathered_bytes = 256 << 20;  ///< of one write of shuffled samples, which lie all over a file
constexpr std::int64_t default_chunk_bytes = 256 << 10;  ///< small, since reading one sample reads its whole chunk
constexpr std::int64_t largest_chunk_bytes = (std::int64_t{4} << 30) - 1;  ///< HDF5's limit

[[noreturn]] void refuse(const std::string& doing, const std::string& fact, const std::string& remedy = {}) {
  throw Error(ExitCode::usage, doing, fact, remedy);
}

void check_names(const std::vector<std::string>& names, const std::string& doing) {
  std::set<std::string> seen;
  for (const auto& name : names) {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos)
      refuse(doing, "\"" + name + "\" cannot be a name", "Give a name that is not empty and has no slash");
    if (!seen.insert(name).second) refuse(doing, "the name \"" + name + "\" comes twice", "Give each name once");
  }
}

void check_output(const std::filesystem::path& output) {
  const std::string doing = "writing " + output.string();
  if (output.extension() != ".h5" && output.extension() != ".hdf5")
    refuse(doing, "the output must end in .h5 or .hdf5", "Name it last, after the inputs");
}

void check_inputs(const std::vector<std::filesystem::path>& inputs, const std::string& doing) {
  if (inputs.empty()) refuse(doing, "there is no input", "Name at least one file");
  for (const auto& input : inputs)
    if (std::error_code error; std::filesystem::status(input, error).type() == std::filesystem::file_type::not_found ||
                               std::filesystem::status(input, error).type() == std::filesystem::file_type::none)
      throw Error(ExitCode::data, "reading " + input.string(), error.message(), "Check the path");
}

/// The samples [begin, end) of the chosen order, and the file that they are written to.
struct Split {
  std::filesystem::path output;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Split k ends at round(samples × the sum of shares 0 … k). So splits are disjoint, and shares that sum to 1 leave no
/// samples out.
std::vector<Split> divide(std::int64_t samples, const std::filesystem::path& output, const ConvertOptions& options) {
  if (options.split.empty()) return {{output, 0, samples}};
  std::vector<Split> splits;
  double sum = 0;
  std::int64_t begin = 0;
  for (const auto& [name, share] : options.split) {
    sum += share;
    const auto end = std::min<std::int64_t>(samples, std::llround(static_cast<double>(samples) * sum));
    const auto file = output.stem().string() + "." + name + output.extension().string();
    splits.push_back({output.parent_path() / file, begin, end});
    begin = end;
  }
  return splits;
}

/// The samples to write, in order.
class Order {
 public:
  /// All of `count` samples, as they lie.
  explicit Order(std::int64_t count) : count_(count) {}
  explicit Order(std::vector<std::int64_t> chosen) : count_(std::ssize(chosen)), chosen_(std::move(chosen)) {}

  std::int64_t size() const noexcept { return count_; }
  /// The indices of the samples at the places begin … begin + count − 1; valid until the next call.
  std::span<const std::int64_t> indices(std::int64_t begin, std::int64_t count) {
    if (!chosen_.empty())
      return std::span(chosen_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
    counted_.resize(static_cast<std::size_t>(count));
    std::iota(counted_.begin(), counted_.end(), begin);
    return counted_;
  }

 private:
  std::int64_t count_;
  std::vector<std::int64_t> chosen_, counted_;
};

/// Returns the samples to write, in order. `last`: the last column; if per_class is set, it must hold the classes, and
/// is loaded.
Order choose(InputColumn& last, const ConvertOptions& options) {
  if (!options.shuffle && !options.per_class) return Order(last.samples());
  std::vector<std::int64_t> order(static_cast<std::size_t>(last.samples()));
  std::iota(order.begin(), order.end(), 0);
  if (options.shuffle) {
    // Fisher–Yates by hand, since the order of std::shuffle depends on the standard library.
    std::mt19937_64 random(*options.shuffle);
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  }
  if (options.per_class) {
    const bool one_value = last.sample_bytes() == last.value_bytes();
    if (!last.holds_whole_numbers() || !one_value)
      refuse("keeping some samples of each class",
             last.shown() + ", the last column, holds " + (one_value ? "fractions" : "several numbers per sample") +
                 ", not classes",
             "Leave --per-class out, or give a last column of one whole number per sample");
    last.load();
    std::unordered_map<std::string, std::int64_t> kept;
    std::erase_if(order, [&](std::int64_t sample) { return kept[last.sample(sample)]++ >= *options.per_class; });
  }
  return Order(std::move(order));
}

/// Samples per chunk for a column of `samples` samples; none if it is to be contiguous.
std::optional<std::int64_t> chunk_of(const InputColumn& column, std::int64_t samples, const ConvertOptions& options) {
  if (!options.chunk && !options.compress) return {};
  const auto bytes = static_cast<std::int64_t>(column.sample_bytes());
  const auto chunk = std::min(options.chunk.value_or(std::max<std::int64_t>(1, default_chunk_bytes / bytes)), samples);
  if (chunk > largest_chunk_bytes / bytes)
    refuse("laying out " + column.shown(), str("a chunk of ", chunk, " samples is larger than 4 GB"),
           "Give a smaller --chunk");
  return chunk;
}

/// How many samples are taken from the column and written at once.
std::int64_t samples_at_once(const InputColumn& column, std::int64_t chunk, const ConvertOptions& options) {
  const auto bytes = static_cast<std::int64_t>(column.sample_bytes());
  constexpr std::int64_t index_bytes = 3 * sizeof(std::int64_t);
  const bool is_gathered = options.shuffle && column.dataset() != H5I_INVALID_HID;
  const auto most = is_gathered ? gathered_bytes / (bytes + index_bytes) : std::min(write_bytes / bytes, most_at_once);
  return std::max<std::int64_t>(1, most / chunk) * chunk;
}

/// Writes the split's samples of the column to one file. Calls `wrote` with the number of bytes of each write, and
/// with 0 between them.
void write_column(DatasetWriter& writer, const std::string& name, InputColumn& column, Order& order, const Split& split,
                  const ConvertOptions& options, const std::function<void(std::uint64_t)>& wrote) {
  const auto samples = split.end - split.begin;
  const auto bytes = static_cast<std::int64_t>(column.sample_bytes());
  const auto chunk = chunk_of(column, samples, options);
  const auto step = std::min(samples_at_once(column, chunk.value_or(1), options), samples);
  auto shape = column.shape();
  shape.front() = samples;
  std::vector<std::byte> values(static_cast<std::size_t>(step * bytes));
  writer.begin_column(name, column.memory_type(), shape, chunk, options.compress);
  if (column.dataset() != H5I_INVALID_HID) writer.copy_attributes(column.dataset(), column.shown());
  for (std::int64_t begin = 0; begin < samples; begin += step) {
    const auto count = std::min(step, samples - begin);
    const auto block = std::span(values).first(static_cast<std::size_t>(count * bytes));
    column.take(order.indices(split.begin + begin, count), block, [&] { wrote(0); });
    writer.write(block, count, column.file_type());
    wrote(block.size());
  }
  writer.end_column();
}

}  // namespace

std::vector<std::string> names_of(std::size_t columns, const ConvertOptions& options) {
  if (!options.columns.empty()) return options.columns;
  if (columns == 1) return {"x"};
  return {"x", "y"};
}

void check_conversion(const std::vector<std::filesystem::path>& inputs, std::size_t columns,
                      const std::vector<std::string>& names, const std::filesystem::path& output,
                      const ConvertOptions& options) {
  const std::string doing = "converting to " + output.string();
  check_inputs(inputs, doing);
  if (columns != names.size())
    refuse(doing, "the input makes " + counted(columns, "column") + " and there are " + counted(names.size(), "name"),
           "Give one name for each, as in --columns x,y");
  check_names(names, "naming columns");
  if (options.chunk && *options.chunk < 1) refuse(doing, "a chunk has at least one sample", "Give --chunk 1 or more");
  if (options.compress && (*options.compress < 1 || *options.compress > 9))
    refuse(doing, "compression has levels from 1 (fast) to 9 (small)", "Give --compress one of them");
  if (options.per_class && *options.per_class < 1)
    refuse(doing, "at least one sample of each class must be kept", "Give --per-class 1 or more");

  double sum = 0;
  std::vector<std::string> parts;
  for (const auto& [name, share] : options.split) {
    if (!(share > 0 && share <= 1))
      refuse("splitting", "the share of " + name + " is not above 0 and at most 1", "Write shares as in train=0.9");
    sum += share;
    parts.push_back(name);
  }
  if (sum > 1 + 1e-9) refuse("splitting", "the shares sum to more than 1", "Give shares that sum to 1 or less");
  check_names(parts, "splitting");
  check_output(output);
  for (const auto& split : divide(0, output, options)) {
    require_output(split.output);
    for (const auto& input : inputs)
      if (std::error_code none; std::filesystem::equivalent(input, split.output, none))
        refuse("writing " + split.output.string(), "it is one of the inputs", "Choose another name");
  }
}

std::vector<std::filesystem::path> convert_columns(std::vector<InputColumn> columns,
                                                   const std::vector<std::string>& names,
                                                   const std::filesystem::path& output, const ConvertOptions& options,
                                                   std::optional<std::int64_t> samples) {
  const auto& first = columns.front();
  for (const auto& column : columns)
    if (column.samples() != first.samples())
      throw Error(ExitCode::data, "converting to " + output.string(),
                  str(first.shown(), " has ", first.samples(), " samples, ", column.shown(), " has ", column.samples()),
                  "Give files that belong together; of h5 and npz, choose columns of one length with --columns");

  auto order = samples ? Order(*samples) : choose(columns.back(), options);
  const auto splits = divide(order.size(), output, options);
  std::uint64_t total = 0;
  std::deque<DatasetWriter> writers;  // a deque does not move its elements
  for (const auto& split : splits) {
    if (split.begin == split.end)
      refuse("splitting", str(split.output, " would get none of the ", order.size(), " samples"),
             "Give it a larger share");
    for (const auto& column : columns)
      total += static_cast<std::uint64_t>(split.end - split.begin) * column.sample_bytes();
    writers.emplace_back(split.output, !options.compress);
  }

  if (const auto left = order.size() - splits.back().end; left > 0)
    log::warn(str("the shares sum to less than 1: ", left, " of the ", order.size(), " samples go to no file"));

  std::vector<ColumnDimensions> dimensions;
  for (std::size_t c = 0; c < columns.size(); ++c)
    if (const auto dataset = columns[c].dataset(); dataset != H5I_INVALID_HID)
      dimensions.push_back(dimensions_of(dataset, names[c], columns[c].shown()));
  if (samples || options.shuffle || options.per_class || !options.split.empty()) forget_ambiguous(dimensions);

  std::uint64_t done = 0;
  const std::function<void(std::uint64_t)> wrote = [&](std::uint64_t bytes) {
    done += bytes;
    if (options.progress) options.progress(done, total);
  };
  for (std::size_t c = 0; c < columns.size(); ++c) {
    auto column = std::move(columns[c]);  // frees its memory before the next column is loaded
    if (options.shuffle && !column.takes_any_order()) column.load();
    for (std::size_t s = 0; s < splits.size(); ++s)
      write_column(writers[s], names[c], column, order, splits[s], options, wrote);
    column.finish();
  }

  for (auto& writer : writers) {
    writer.name_dimensions(dimensions);
    writer.finish();
  }
  std::vector<std::filesystem::path> written;
  for (auto& writer : writers) {
    writer.put_in_place();
    written.push_back(writer.output());
  }
  return written;
}

}  // namespace muster::detail::convert
