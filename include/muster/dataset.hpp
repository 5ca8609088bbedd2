// Datasets: named columns with one leading dimension, the samples.
//
//   muster::Dataset train("train.h5");                         // every column of the file's root group
//   auto two = muster::Dataset::from_hdf5({"a.h5:/g", "b.h5:/g"}, {.columns = {"x", "y"}});
//   auto small = muster::Dataset::from_tensors({{"x", x}, {"y", y}});
//   auto items = muster::Dataset::from_items({{{"x", 0}, {"y", 1}}, {{"x", 1}, {"y", 3}}});
//   auto texts = muster::Dataset::ragged("texts.h5", {.values = {"tokens"}});  // samples of different length
//   auto lines = muster::Dataset::from_stream(read_my_share);  // rows that have no index; see there
//
// Inside a training function, session.get_dataset_shard("train").iter_torch_batches({…}) gives this rank's batches.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/json.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace muster {

class Dataset;

namespace detail::data {
class Source;
class BatchStream;
struct ShardState;
MUSTER_API const std::shared_ptr<Source>& source_of(const Dataset& dataset) noexcept;
MUSTER_API Dataset dataset_of(std::shared_ptr<Source> source);
}  // namespace detail::data
namespace detail::step {
struct BatchWeight;
}

class Preprocessor;

/// One column: `shape` is the shape of one sample, without the leading dimension; −1 if a size differs from batch to
/// batch.
struct Column {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
  bool operator==(const Column&) const = default;
};
using Schema = std::vector<Column>;

/// An ordered map from column names to tensors of shape [rows, …], all with the same number of rows.
class MUSTER_API Batch {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  Batch() = default;
  /// `samples`: how many rows count; default: all. `global_samples`: how many rows count on all ranks of the step
  /// together; default: `samples`. `step`: the batch's weight in a step of a split dataset.
  explicit Batch(std::vector<Item> items, std::optional<std::int64_t> samples = {},
                 std::optional<std::int64_t> global_samples = {},
                 std::shared_ptr<const detail::step::BatchWeight> step = {});

  /// The column of that name; an Error that lists the columns if there is none. The reference stays valid as long as
  /// the batch, whatever set() adds.
  at::Tensor& operator[](std::string_view name);
  const at::Tensor& operator[](std::string_view name) const;
  /// Adds a column, or replaces the one of that name. Does not check the number of rows.
  void set(std::string name, at::Tensor value);
  bool contains(std::string_view name) const noexcept;

  /// Samples in this batch: the number of rows. In the last step of an epoch a rank may get an empty batch: its size is
  /// 0, but it has one row (a copy of another rank's), so that training code needs no special case.
  std::int64_t size() const noexcept { return samples_; }
  /// Samples in this step over all ranks that share the dataset.
  std::int64_t global_size() const noexcept { return global_samples_; }
  /// The weight of this batch's gradient, relative to an even batch: size() × micro-batches of the step (one per worker
  /// unless ScalingConfig::virtual_workers is set) / global_size(). It is 1 if all batches of the step have the same
  /// size or if the dataset is not split, and 0 for an empty batch. It does not change later.
  double weight() const;

  auto begin() const noexcept { return items_.begin(); }
  auto end() const noexcept { return items_.end(); }
  std::size_t num_columns() const noexcept { return items_.size(); }

 private:
  friend const std::shared_ptr<const detail::step::BatchWeight>& step_weight_of(const Batch& batch) noexcept {
    return batch.step_;
  }

  std::deque<Item> items_;  // keeps references valid when columns are added
  std::int64_t samples_ = 0;
  std::int64_t global_samples_ = 0;
  std::shared_ptr<const detail::step::BatchWeight> step_;
};

struct DatasetOptions {
  /// Selects and orders the columns; empty: every dataset of the group with the same first dimension, in the order of
  /// names. "particles.mass" is the field `mass` of a dataset of compound values.
  std::vector<std::string> columns = {};
  /// Bytes of memory for values that must be decoded or converted, on every rank that reads them. Must be the same on
  /// all ranks. If all decoded chunks fit, the ranks of a node keep them once, in /dev/shm, instead of once per rank:
  /// see Dataset. Contiguous columns and chunks without filters need none: they are read directly from the file.
  /// Decoded chunks are kept as long as there is room. When there is none, a chunk of which the pass has read all
  /// samples is dropped, or else the one that was used least recently. A chunk that is read in order, or whole by one
  /// batch, is kept only from the second time on. If the decoded chunks of a column do not fit, BatchOptions::shuffle
  /// takes an order that reads each chunk once. Columns that HDF5 must convert (numbers of fewer bits than their bytes
  /// have, say) or decode (a filter that muster does not know) are read once, whole, and kept if they fit. If not, HDF5
  /// keeps some chunks, and values without chunks are read batch by batch, slowly if shuffled. If the files are larger
  /// than the memory of the node or of the job's control group, BatchOptions::shuffle reads encoded chunks of 64 KB or
  /// more past the page cache. Until they are decoded they take up to max(cache_bytes / 4, 64 MB) beside cache_bytes.
  /// Chunks of each size get their memory in blocks of up to 16 MB, or of one chunk if it is larger.
  std::int64_t cache_bytes = std::int64_t{1} << 30;
};

/// Which windows of an array are samples. `size`, `stride` and `margin` have a number of values for each dimension.
struct WindowOptions {
  /// The size of a window in each dimension of the first variable; 0: the whole dimension.
  std::vector<std::int64_t> size;
  /// The distance from one window to the next; 0, or an empty list: the window's size, so that windows do not overlap.
  std::vector<std::int64_t> stride = {};
  /// How many more values a window gets on each side, at most as many as the dimension has; empty: none. Beyond the
  /// ends of the array they are NaN, or 0 in a column without NaN.
  std::vector<std::int64_t> margin = {};
  /// "FILE:/NAME", a variable with some of the first one's dimensions. A window is left out unless at least
  /// `mask_share` of the mask's values in it, margins apart, are neither 0 nor NaN. An Error (ExitCode::data) if no
  /// window is left.
  std::optional<std::string> mask = {};
  double mask_share = 1;
  /// Parts of dimensions, by the values of their coordinates as they are stored: {{"time", {first, last}}} leaves out
  /// windows with a value, margins apart, whose time is below first or above last. A coordinate is a variable with the
  /// name of its only dimension, as NetCDF has them, in the group of the first variable or one around it. Windows begin
  /// at the first value of the part, and `origin` and the margins are those in the whole variable. An Error
  /// (ExitCode::data) if there is no such coordinate, if no value lies in the part, or if values outside of it lie
  /// between values inside. For a part by index, see Dataset::subset.
  std::vector<std::pair<std::string, std::pair<double, double>>> range = {};
  /// See DatasetOptions::cache_bytes.
  std::int64_t cache_bytes = std::int64_t{1} << 30;
};

/// How samples of different length lie in each file: their values one after the other, and where each sample begins.
struct RaggedOptions {
  /// Columns of values, each [sum of the lengths, …]; at least one. They have the same offsets.
  std::vector<std::string> values;
  /// A column of integers [samples of the file + 1]: its sample i has the values offsets[i] … offsets[i + 1] − 1. The
  /// first offset is 0, none is less than the one before, and the last is the file's number of values.
  std::string offsets = "offsets";
  /// Further columns, each [samples, …], such as labels.
  std::vector<std::string> columns = {};
  /// The number that fills a sample up to the length of the longest one of its batch. The types of all `values` must be
  /// able to hold it.
  at::Scalar padding = 0;
  /// Values of a sample beyond this length are left out; empty: none are.
  std::optional<std::int64_t> max_length = {};
  /// See DatasetOptions::cache_bytes. BatchOptions::shuffle does not use lanes here: if encoded chunks do not fit, a
  /// random order decodes almost one chunk for each sample.
  std::int64_t cache_bytes = std::int64_t{1} << 30;
};

/// A worker's share of a stream: the rows of `worker`, 0 … workers − 1, which no other worker gets. If the stream is
/// not split (DataConfig), each worker gets share 0 of 1.
struct StreamShard {
  int worker = 0;
  int workers = 1;
  std::int64_t epoch = 0;
  /// For the reader's random numbers; no other thread uses it. Seeded from the run's seed, the dataset's name, the
  /// epoch, the number of the pass in the epoch, and `worker`. torch's default generator belongs to the training
  /// thread: what another thread draws from it differs from run to run.
  at::Generator generator = {};
  /// Requests a stop when no more rows are needed, since the pass was left early or an exception has ended it. A reader
  /// that may wait for long should check it, or register a std::stop_callback, and then return; its last rows are
  /// dropped.
  std::stop_token stop = {};
};

/// What a stream's reader returns: one row as a JSON object of numbers, booleans and arrays of them, or a Batch of any
/// number of rows. The tensors of the Batch belong to muster from then on.
class StreamRows {
 public:
  template <std::same_as<Json> Row>
  StreamRows(Row row) : rows_(std::move(row)) {}
  StreamRows(Batch rows) : rows_(std::move(rows)) {}

  std::variant<Json, Batch> take() && { return std::move(rows_); }

 private:
  std::variant<Json, Batch> rows_;
};

/// Returns the next rows of a share; an empty optional at its end.
using StreamReader = std::function<std::optional<StreamRows>()>;
/// Starts reading a share; returns its reader.
using MakeStream = std::function<StreamReader(const StreamShard&)>;

namespace detail::data {
/// True for a function that can change the batch it is given. False for one that takes a Batch by value, which would
/// change a copy: such a function accepts a temporary, too.
template <class F, class... Given>
concept ChangesBatch = std::invocable<F&, Batch&, Given...> &&
    std::is_void_v<std::invoke_result_t<F&, Batch&, Given...>> && !std::invocable<F&, Batch, Given...>;
}  // namespace detail::data

/// A function that changes a batch in place, see Dataset::map_batches(). It takes a Batch& and, if it wants one, an
/// at::Generator&, and returns nothing.
class BatchFunction {
 public:
  using WithGenerator = std::function<void(Batch&, at::Generator&)>;
  using Plain = std::function<void(Batch&)>;

  template <detail::data::ChangesBatch<at::Generator&> F>
  BatchFunction(F function) : function_(WithGenerator(std::move(function))) {}
  template <detail::data::ChangesBatch F>
  requires(!detail::data::ChangesBatch<F, at::Generator&>) BatchFunction(F function)
      : function_(Plain(std::move(function))) {}

  std::variant<WithGenerator, Plain> take() && { return std::move(function_); }

 private:
  std::variant<WithGenerator, Plain> function_;
};

struct MapOptions {
  /// At most this many calls of the function at once in a pass, for different batches. With 1, calls come one at a
  /// time and in the order of the batches. With more, the function must be safe to call from several threads.
  int threads = 1;
};

/// A handle to a dataset; copies are cheap and share it. Files are opened and fully checked at first use (an Error with
/// ExitCode::data). A dataset must be the same on all ranks: count, columns, sizes and some blocks are compared before
/// training.
///
/// In training the ranks of a node decode chunks for each other: each chunk once, by the rank that needs it first, into
/// memory that all of them read. This holds for a dataset given to a trainer or an operator whose decoded chunks all
/// fit into DatasetOptions::cache_bytes, if the ranks read the same file (not copies) and the chunks fit into three
/// quarters of /dev/shm beside what is there; the rest is for gradients. Otherwise, and for columns that HDF5 reads,
/// each rank has its own copy. The values are the same either way.
class MUSTER_API Dataset {
 public:
  /// "FILE.h5" or "FILE.h5:/group"; or a Zarr store, "STORE.zarr[:/group]", see from_hdf5().
  Dataset(const char* path);
  Dataset(const std::string& path);
  Dataset(const std::filesystem::path& path);

  /// One dataset from several files, in the given order; their columns must agree.
  ///
  /// HDF5 files, and so those of NetCDF-4, h5py and MATLAB (-v7.3), in any byte order. uint16, uint32 and uint64 become
  /// int32, int64 and int64; a uint64 above 2^63 − 1 is an Error when it is read. Enumerations become their integers.
  /// NetCDF's packed values are unpacked: with an attribute scale_factor or add_offset, a value v becomes v ×
  /// scale_factor + add_offset, a float32 if it is stored in 1 or 2 bytes or as float32, and otherwise a float64. In
  /// unpacked columns, and in columns of floats, stored values that equal _FillValue or missing_value, or lie outside
  /// of valid_range, valid_min and valid_max, become NaN. Integers that are not packed stay as they are. So do values
  /// that were never written, if there is no _FillValue. A limit that is a fraction does not count for integers. These
  /// attributes may hold numbers as text; one that holds no number is an Error. Signed integers with the attribute
  /// _Unsigned = "true" are read as unsigned ones, and unsigned ones with "false" as signed. A virtual dataset is read
  /// through HDF5, slower than its files as one dataset. Its sources lie in the same folder.
  ///
  /// A path may also name a Zarr store, a folder or a zip archive, of version 2 or 3. Its arrays are read as columns in
  /// compressed chunks, with the same attributes. A missing chunk has the fill value. An Error (ExitCode::data) names a
  /// codec that is not known here, and what a column of strings, dates, objects or compound values holds. Links inside
  /// of a store are refused. docs/data.md lists the codecs.
  static Dataset from_hdf5(std::vector<std::string> paths, DatasetOptions options = {});
  /// Windows of arrays: time series, patches of images, volumes. Each variable, "FILE:/NAME", where FILE may be a Zarr
  /// store, makes a column of its name and of the window's shape, margins included, converted as in from_hdf5(). The
  /// column "origin", int64 [dimensions], has the place of the window's first value, margins apart.
  ///
  ///   auto weather = muster::Dataset::windows({"era5.nc:/t2m", "era5.nc:/u10", "era5.nc:/orography"},
  ///                                           {.size = {12, 64, 64}, .stride = {6, 32, 32}});
  ///
  /// The first variable has the dimensions of the windows. The others are aligned with it by the names of their
  /// dimensions, as NetCDF has them, and may lack some: a window of orography [latitude, longitude] goes with that of
  /// t2m [time, latitude, longitude] at the same place. Without names they must have the same shape, and it is an Error
  /// (ExitCode::data) if two dimensions have the same size, other than 1. Windows that would end beyond the array are
  /// left out.
  ///
  /// Windows that share chunks of the file have neighbouring indices: a chunk's windows come one after the other. Of
  /// encoded chunks that do not fit into cache_bytes, a shuffled pass takes the windows of up to 64 chunks at a time,
  /// see BatchOptions::shuffle.
  static Dataset windows(std::vector<std::string> variables, WindowOptions options);
  /// Samples of different length, such as sentences, from files in the given order: "FILE.h5" or "FILE.h5:/group". The
  /// columns of the files must agree, and each file has its own offsets.
  ///
  ///   auto sentences = muster::Dataset::ragged("corpus.h5", {.values = {"tokens"}, .columns = {"label"}});
  ///   auto more = muster::Dataset::ragged({"a.h5", "b.h5"}, {.values = {"tokens"}, .columns = {"label"}});
  ///   // shard.iter_torch_batches({.batch_size = 32, .shuffle = true, .bucket_samples = 32 * workers})
  ///
  /// A batch has each column of `values` as [rows, longest sample of the batch, …], padded at the end, and one mask,
  /// named after the first of them, "tokens_mask", bool [rows, longest]: true where a value is real. Then come the
  /// `columns`. Each rank pads to the longest of its own samples. A sample may be empty; a batch of empty samples alone
  /// has the shape [rows, 0, …]. In schema() the length is −1. Values are converted as in from_hdf5(). The offsets are
  /// kept in memory, 8 bytes for each sample. An Error (ExitCode::data) when the file is opened if they are not as
  /// RaggedOptions::offsets says.
  static Dataset ragged(std::vector<std::string> paths, RaggedOptions options);
  template <std::convertible_to<std::string> Path>
  static Dataset ragged(const Path& path, RaggedOptions options) {
    return ragged(std::vector<std::string>{path}, std::move(options));
  }
  /// A dataset in memory. All tensors must have the same first dimension, and the same values on all ranks.
  static Dataset from_tensors(std::vector<std::pair<std::string, at::Tensor>> columns);
  /// A dataset in memory, given row by row. `items` is a list of JSON objects with the same keys, which are the columns
  /// in the order of names, or a list of plain values, which make one column "item" (from_items({1, 2, 3})). Values are
  /// numbers, booleans, or arrays of them, with the same shape in every row; numbers make a column of shape [rows].
  /// Whole numbers become int64 and others float64, as in Ray and NumPy; BatchOptions::dtypes converts them to float32.
  /// The rows must be the same on all ranks.
  static Dataset from_items(const Json& items);
  /// Rows that arrive one after the other and have no index: lines of a socket, the output of a simulation, files in
  /// your own format. In every pass `make` is called on each worker. It returns the reader of that worker's share: a
  /// function that returns rows (JSON objects or Batches) until there are none. The reader is called on another thread,
  /// which reads ahead; what it throws ends training on all workers.
  ///
  /// All rows must have the same columns, types and shapes. The first JSON row determines the types: whole numbers make
  /// int64, other numbers float64. Later rows may have whole numbers in a float64 column. A float in an int64 column is
  /// an Error (ExitCode::data), unless BatchOptions::dtypes converts that column to a floating type.
  ///
  ///   auto lines = muster::Dataset::from_stream([](const muster::StreamShard& shard) {
  ///     auto file = std::make_shared<std::ifstream>("part-" + std::to_string(shard.worker) + ".txt");
  ///     return [file]() -> std::optional<muster::Json> {
  ///       double x = 0, y = 0;
  ///       if (!(*file >> x >> y)) return {};
  ///       return muster::Json{{"x", x}, {"y", y}};
  ///     };
  ///   });
  ///
  /// All workers take the same number of steps. Before each step they agree on its number of rows, so the passes of a
  /// split stream are collective, even those that do not train. A worker that has no more rows gets an empty batch of
  /// weight 0 (see Batch::size), and a pass ends when no worker has rows. If a stream is not split, each worker reads
  /// all of it, as share 0 of 1.
  ///
  /// A reader that waits should check StreamShard::stop. If a pass is left during a call of its reader, it waits for
  /// that call, at most for the job's --timeout; then the job ends (ExitCode::retry).
  ///
  /// A stream has no known position. So report a State only after the pass is over; a stop is obeyed there too. A run
  /// that continues, at any number of workers, begins with a new pass. Everything that needs a count or an index is an
  /// Error (ExitCode::usage): count(), schema(), read(), fitting a preprocessor (a fitted one is applied), `shuffle`,
  /// `local_shuffle_buffer_size`, `weights`, `bucket_samples`, ScalingConfig::virtual_workers.
  static Dataset from_stream(MakeStream make);

  /// The number of samples.
  std::int64_t count() const;
  /// The columns, in order. A size of −1 stands for a dimension whose size differs from batch to batch, see ragged().
  Schema schema() const;
  /// The samples with the given indices, in the given order (0 ≤ i < count(); repeats allowed). The random numbers of a
  /// preprocessor depend on the first index only.
  Batch read(std::span<const std::int64_t> samples) const;
  /// All values of one column: a tensor [count(), …] on the CPU. It reads the samples with all of their columns, so
  /// choose this column alone in DatasetOptions::columns where the others are large. An Error (ExitCode::usage) if the
  /// column's samples are of different length.
  at::Tensor column(const std::string& name) const;
  /// The samples with the given indices, in the given order (0 ≤ i < count(); repeats allowed), as a dataset.
  ///
  ///   auto parts = muster::Dataset("all.h5").random_split({0.8, 0.2}, /*seed=*/7);
  ///   // trainer options: .datasets = {{"train", parts[0]}, {"test", parts[1]}}
  ///
  /// subset() and random_split() open the dataset. Nothing is copied: a subset has its list of indices in memory, and a
  /// part of a random split has nothing. An Error (ExitCode::usage) if an index does not exist, if a part would be
  /// empty, or for a stream. The dataset's preprocessors are applied to the subset; the subset's own, only to the
  /// subset. `shuffle` and all other options of a pass work as on any dataset, except that a subset of a dataset with
  /// encoded chunks has no order in lanes (BatchOptions::shuffle). If its chunks do not fit into
  /// DatasetOptions::cache_bytes, a random order decodes almost a chunk for each sample.
  Dataset subset(std::vector<std::int64_t> samples) const;
  /// Random parts that have no sample in common and together have all of them, the same on every machine for one seed.
  /// `fractions` must be positive and have the sum 1. Part i gets fractions[i] × count() samples, rounded down; samples
  /// that are left go to the parts with the largest remainders. Each part is in random order.
  std::vector<Dataset> random_split(std::vector<double> fractions, std::uint64_t seed = 0) const;
  /// The dataset with a preprocessor (already fitted) that is applied to every batch after reading. An Error
  /// (ExitCode::data) if it changes the number of rows. `threads` as in map_batches(); it has no effect on a
  /// preprocessor that takes no generator.
  Dataset transform(std::shared_ptr<const Preprocessor> preprocessor, MapOptions options = {}) const;
  /// The dataset with a function that is applied to every batch after reading. Functions and preprocessors are applied
  /// in the order in which the dataset got them, before BatchOptions::dtypes and the batches' device.
  ///
  ///   auto train = muster::Dataset("train.h5").map_batches(
  ///       [](muster::Batch& batch) { batch.set("log_x", batch["x"].log()); }, {.threads = 4});
  ///
  /// The function may add, replace and reshape columns. An Error (ExitCode::data) if it changes the number of rows. It
  /// takes random numbers only from its generator, which is seeded as the one of Preprocessor::transform(). So they do
  /// not depend on `threads`. schema() calls the function for one sample, on the caller's thread, as read() does.
  ///
  /// In a pass the function is called on other threads, ahead of time. If no function or preprocessor of the dataset
  /// has more than one thread, the thread that reads calls them. Otherwise there are as many more threads as the
  /// largest `threads` says, and up to BatchOptions::prefetch_batches + threads − 1 batches are read ahead. If
  /// prefetch_batches is 0, or after a preprocessor that takes no generator, the function is called on the thread that
  /// iterates. Its exceptions are thrown when their batch is due. A pass that is left early waits for the calls under
  /// way. torch's operators use as many threads in each of these threads as in the one that iterates.
  ///
  /// An Error (ExitCode::usage) if there is no function or `threads` is less than 1.
  Dataset map_batches(BatchFunction function, MapOptions options = {}) const;

 private:
  friend const std::shared_ptr<detail::data::Source>& detail::data::source_of(const Dataset& dataset) noexcept;
  friend Dataset detail::data::dataset_of(std::shared_ptr<detail::data::Source> source);
  explicit Dataset(std::shared_ptr<detail::data::Source> source);
  std::shared_ptr<detail::data::Source> source_;
};

/// Weights for BatchOptions::weights by which each class is drawn equally often: 1 / (number of classes × samples of
/// the class), a double tensor [samples] whose sum is 1. `labels`: integers [samples], the class of each sample. An
/// Error (ExitCode::usage) for other tensors.
///
///   const auto labels = muster::Dataset::from_hdf5({"train.h5"}, {.columns = {"y"}}).column("y");
///   // .weights = muster::balanced_weights(labels)
MUSTER_API at::Tensor balanced_weights(const at::Tensor& labels);

/// The types that columns are converted to: one for all columns, or one for each named column.
///
///   {.dtypes = at::kFloat}
///   {.dtypes = {{"x", at::kFloat}, {"y", at::kLong}}}
class ColumnTypes {
 public:
  using Named = std::map<std::string, at::ScalarType>;

  ColumnTypes() = default;
  ColumnTypes(at::ScalarType of_all) : all_(of_all) {}
  ColumnTypes(Named named) : named_(std::move(named)) {}
  ColumnTypes(std::initializer_list<Named::value_type> named) : named_(named) {}

  /// The type for all columns; empty if none was given.
  const std::optional<at::ScalarType>& all() const noexcept { return all_; }
  /// The types by column name.
  const Named& named() const noexcept { return named_; }
  /// The type to which `column` is converted; none if it keeps its own.
  std::optional<at::ScalarType> of(const std::string& column) const {
    const auto found = named_.find(column);
    return found != named_.end() ? found->second : all_;
  }
  bool operator==(const ColumnTypes&) const = default;

 private:
  std::optional<at::ScalarType> all_;
  Named named_;
};

struct BatchOptions {
  /// Samples per worker and step.
  std::int64_t batch_size = 256;
  /// Samples per step over all workers, in place of batch_size: the same at any number of workers. They are divided
  /// among the workers as evenly as possible. If the dataset is whole on each worker, a batch has this number divided
  /// by the number of workers, rounded up.
  std::optional<std::int64_t> global_batch_size = {};
  /// True if a pass over a split dataset trains: its batches weight the gradients and are counted as steps and samples,
  /// and it belongs to the epoch from which a stopped run continues. All workers must take its batches alike, one by
  /// one, and may stop between two of them (see Session). A pass that begins while no gradients are recorded
  /// (torch::NoGradGuard, session.evaluation) never trains. If no gradients are averaged in a training pass of several
  /// batches, there is a warning, once.
  ///
  /// The options that decide which samples a pass takes (batch_size, global_batch_size, `shuffle`, `drop_last`,
  /// local_shuffle_buffer_size and local_shuffle_seed, `weights`, `num_samples`, `bucket_samples`) must be the same on
  /// all workers. That is checked for training passes, at the next report at the latest: an Error (ExitCode::usage),
  /// the same on all workers, names the option. A pass inside of another one is not checked.
  bool training = true;
  /// Takes the samples in a random order of the whole dataset, a new one in each pass of each epoch, drawn from the
  /// run's seed.
  ///
  /// Columns of encoded chunks that are too large for DatasetOptions::cache_bytes are shuffled in lanes, so that a
  /// chunk is decoded once in a pass. There are 64 lanes, or fewer if cache_bytes does not hold 128 chunks. The chunks
  /// are put in random order and dealt out to the lanes. A lane gives the rows of one chunk in random order and then
  /// those of its next chunk, and the pass takes one row from each lane in turn. So consecutive samples come from
  /// different chunks. If the number of lanes is a multiple of the number of workers, and the step's samples are a
  /// multiple or a divisor of the number of lanes, each lane belongs to one worker, which alone decodes its chunks.
  /// Otherwise several workers decode the chunks of some lanes. Where HDF5 decodes (see cache_bytes), a dataset of many
  /// files may decode some chunks more often, as each file gets an equal part of cache_bytes. The order does not depend
  /// on the number of workers, and a run resumes in it at any number of workers.
  bool shuffle = false;
  /// Leaves out the last step of a pass if it is not full. In a stream, each worker leaves out its last batch if that
  /// is not full.
  bool drop_last = false;
  /// How many batches are read ahead; more if a function asks for threads, see Dataset::map_batches(). With 0, all
  /// work is done on the thread that iterates.
  int prefetch_batches = 1;
  /// Shuffles only within blocks of this many samples per worker, which is cheaper for the disk than `shuffle`.
  std::optional<std::int64_t> local_shuffle_buffer_size = {};
  /// The seed of the local shuffle; empty: the run's seed. Allowed only with local_shuffle_buffer_size.
  std::optional<std::uint64_t> local_shuffle_seed = {};
  /// Draws samples with replacement, sample i with the probability weights[i] / sum of the weights, as torch's
  /// WeightedRandomSampler does. A tensor [count()] of numbers ≥ 0 on the CPU; empty: each sample comes once. It is
  /// read when the range is made, and must be the same on all ranks.
  ///
  /// The draw at a position depends on the weights, the seed, the dataset's name, the epoch, the pass and the position,
  /// not on the workers. Each draw takes 128 random bits. Its probabilities have a relative error of at most 2^-52 +
  /// count() × 2^-64 and an absolute one of 2^-63: a weight below that part of the sum is never drawn. The pass keeps
  /// 16 bytes of memory for each sample, and takes up to 40 more while it begins.
  ///
  /// A pass that was interrupted needs its own weights to go on: if weights change, save them in the State. With other
  /// weights it is an Error (ExitCode::data).
  ///
  /// Draws have no order in lanes (see `shuffle`): of encoded chunks that do not fit into DatasetOptions::cache_bytes,
  /// almost a chunk is decoded for each draw. An Error (ExitCode::usage) with `shuffle` or a local shuffle, or if the
  /// weights are of another size, negative, not finite, or all zero.
  at::Tensor weights = {};
  /// How many samples a pass draws by `weights`; empty: count(). Allowed only with weights.
  std::optional<std::int64_t> num_samples = {};
  /// With `shuffle`, brings samples of like length together, which saves padding. For a dataset of samples of different
  /// length, see Dataset::ragged; for others it is an Error (ExitCode::usage).
  ///
  /// The shuffled order is divided into windows of 100 × bucket_samples. The samples of a window are sorted by length
  /// and cut into buckets of `bucket_samples`. The buckets come in random order, a short one at the end of the pass,
  /// and the samples of a bucket in random order. Use the number of samples per step over all workers, or a multiple.
  /// The order does not depend on the number of workers.
  std::optional<std::int64_t> bucket_samples = {};
  /// Converts columns after reading, as in {{"x", at::kFloat}}, or all of them, as in at::kFloat.
  ColumnTypes dtypes = {};
  /// The batches' device; empty: the session's device, or the CPU for iter_batches(). To a GPU, batches that are read
  /// ahead are copied ahead too, from pinned memory and on a stream of their own. No thread waits for the copy: when a
  /// batch is taken, the current stream of that thread waits for it. Any other stream that uses the batch must first
  /// wait for this current stream.
  std::optional<at::Device> device = {};
};

/// One pass over a shard. It begins with begin(), which may be called once, and ends after its last batch or when the
/// range is destroyed. Owns what it iterates over. An error in reading (muster::Error with ExitCode::data, or what a
/// preprocessor throws) is thrown by begin() or ++ when that batch is due, and again by each ++ after it.
class MUSTER_API BatchRange {
 public:
  class iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    Batch& operator*() const;
    Batch* operator->() const { return &**this; }
    iterator& operator++();
    void operator++(int) { ++*this; }
    friend bool operator==(const iterator& a, std::default_sentinel_t) noexcept { return a.at_end(); }

   private:
    friend class BatchRange;
    bool at_end() const noexcept;
    detail::data::BatchStream* stream_ = nullptr;
  };

  explicit BatchRange(std::unique_ptr<detail::data::BatchStream> stream);
  BatchRange(BatchRange&&) noexcept;
  BatchRange& operator=(BatchRange&&) noexcept;
  ~BatchRange();

  iterator begin();
  std::default_sentinel_t end() const noexcept { return {}; }
  /// The number of batches of this pass on this worker, or of the pass that would begin now: one per step, unless a
  /// step has several micro-batches on a worker (ScalingConfig::virtual_workers). Batches before a resumed position are
  /// not counted. An Error for a stream.
  std::int64_t num_batches() const;

 private:
  std::unique_ptr<detail::data::BatchStream> stream_;
};

/// A worker's part of a dataset: its share of each step if the dataset is split, otherwise all of it.
///
/// In a split dataset, step s takes the next workers × batch_size samples of one order f(seed, name, epoch, pass). It
/// is the same on all ranks; the samples of the last step are divided evenly. So every sample comes once, all ranks
/// take the same number of steps, and the position is a single number.
///
/// A report inside a training pass counts the current batch as taken. A run that resumes there, at any number of
/// workers, gets empty ranges for the training passes of that epoch that were already finished, and continues the
/// current one after that batch. Other passes inside that batch, such as a validation every so many steps, are not
/// repeated; the next such pass is whole. A dataset that is whole on each worker has no position: its passes are always
/// whole and do not count for an epoch. Use a shard only in the thread that runs the training function.
///
/// Passes inside and outside of the loop over session.epochs() are counted separately. So statistics before the loop,
/// in every start or only in a fresh one, do not change where a run continues. Inside the loop an epoch must make the
/// same passes in every start; it is an Error if the epoch ends before the pass in whose middle the run was saved.
///
/// Between two starts the number of workers, the batch sizes, `shuffle`, `bucket_samples` and `num_samples` may change:
/// a pass that was interrupted is finished in its original order, and the next pass has the new order. The names of
/// datasets and the numbers of their samples must stay. A pass by weights or in buckets that was interrupted needs the
/// weights or lengths with which it began.
///
/// Only one open training pass over a shard can be saved. It is an Error to report a State while a second one is open
/// (side by side, or one inside a batch of the other), and a stop is not obeyed there. Two names for the same data in
/// the trainer's datasets have separate positions. An inner pass that begins with `.training = false` or under
/// torch::NoGradGuard has no position, and session.step(batch) still weights its batches.
class MUSTER_API DatasetShard {
 public:
  explicit DatasetShard(std::shared_ptr<detail::data::ShardState> state);

  /// A pass of batches on the session's device, unless `device` is given, and converted as `dtypes` says.
  BatchRange iter_torch_batches(BatchOptions options = {}) const;
  /// A pass of batches as they are stored, on the CPU and with their types, unless `dtypes` and `device` are given.
  BatchRange iter_batches(BatchOptions options = {}) const;

  /// Sets the epoch that seeds the order. session.epochs() calls it; call it in your own loops, where otherwise all
  /// passes belong to the same epoch. It also sets the epoch of the session and of every shard whose epoch was never
  /// set. Inside session.epochs(), another epoch than the loop's is an Error (ExitCode::usage).
  void set_epoch(std::int64_t epoch) const;

  /// The number of samples of the whole dataset.
  std::int64_t count() const;
  Schema schema() const;

 private:
  std::shared_ptr<detail::data::ShardState> state_;
};

}  // namespace muster
