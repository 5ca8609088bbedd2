// Datasets: named columns with one leading dimension, the samples.
//
//   muster::Dataset train("train.h5");                         // every column of the file's root group
//   auto two = muster::Dataset::from_hdf5({"a.h5:/g", "b.h5:/g"}, {.columns = {"x", "y"}});
//   auto small = muster::Dataset::from_tensors({{"x", x}, {"y", y}});
//   auto items = muster::Dataset::from_items({{{"x", 0}, {"y", 1}}, {{"x", 1}, {"y", 3}}});
//   auto lines = muster::Dataset::from_stream(read_my_share);  // rows that have no index; see there
//
// Inside a training function, session.get_dataset_shard("train").iter_torch_batches({…}) gives this rank's batches.
#pragma once

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
#include <utility>
#include <variant>
#include <vector>

namespace muster {

namespace detail::data {
class Source;
class BatchStream;
struct ShardState;
}  // namespace detail::data
namespace detail::step {
struct BatchWeight;
}

class Preprocessor;

/// One column: `shape` is that of a sample, without the leading dimension.
struct Column {
  std::string name;
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
  bool operator==(const Column&) const = default;
};
using Schema = std::vector<Column>;

/// An ordered map of columns to tensors of shape [rows, …], as many rows in each.
class Batch {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  Batch() = default;
  /// `samples`: how many rows count, here and over all ranks of the step; all rows, and as many, unless given. `step`:
  /// what it is of a step of a split dataset.
  explicit Batch(std::vector<Item> items, std::optional<std::int64_t> samples = {},
                 std::optional<std::int64_t> global_samples = {},
                 std::shared_ptr<const detail::step::BatchWeight> step = {});

  /// The column of that name; an Error that lists the columns if there is none. The reference stays good as long as the
  /// batch, whatever set() adds.
  at::Tensor& operator[](std::string_view name);
  const at::Tensor& operator[](std::string_view name) const;
  /// Adds the column or replaces it.
  void set(std::string name, at::Tensor value);
  bool contains(std::string_view name) const noexcept;

  /// Samples in this batch: the rows, but 0 in the batch of a rank that is left empty in the last step of an epoch,
  /// which has one row of somebody else's so that nothing has to be a special case.
  std::int64_t size() const noexcept { return samples_; }
  /// Samples in this step over all ranks that share the dataset.
  std::int64_t global_size() const noexcept { return global_samples_; }
  /// What this batch's gradient counts, in units of an even batch: size() × micro-batches of the step (one per worker,
  /// unless there are ScalingConfig::virtual_workers) / global_size(). 1 where all have as many and for a batch of no
  /// split dataset, 0 for a rank that is left empty. It stays with the batch.
  double weight() const;
  const std::shared_ptr<const detail::step::BatchWeight>& step() const noexcept { return step_; }

  auto begin() const noexcept { return items_.begin(); }
  auto end() const noexcept { return items_.end(); }
  std::size_t num_columns() const noexcept { return items_.size(); }

 private:
  std::deque<Item> items_;  // whose references stay good
  std::int64_t samples_ = 0;
  std::int64_t global_samples_ = 0;
  std::shared_ptr<const detail::step::BatchWeight> step_;
};

struct DatasetOptions {
  /// Chooses and orders; every dataset of the group with the same first dimension unless given, in the order of names.
  std::vector<std::string> columns = {};
  /// Chunked, compressed or byte-swapped columns are read once, whole, and kept in memory by every rank that reads
  /// them, as long as they take no more than this together; those beyond are read from the file batch by batch, which
  /// is far slower in a random order. Contiguous columns need neither: they are read where they lie.
  std::int64_t cache_bytes = std::int64_t{1} << 30;
};
void to_json(Json& json, const DatasetOptions& options);
void from_json(const Json& json, DatasetOptions& options);

/// Which share of a stream is asked for: that of `worker`, 0 … workers − 1, whose rows no other worker gives.
struct StreamShard {
  int worker = 0;
  int workers = 1;
  std::int64_t epoch = 0;
  /// For random numbers that the reader draws; no other thread uses it. Seeded from the run's seed, the dataset's name,
  /// the epoch, the number of the pass in the epoch, and `worker`. torch's default generator belongs to the thread that
  /// trains: what another thread draws from it is different in every run.
  at::Generator generator = {};
  /// Asked to stop when nobody wants more rows: the pass is left early, or an exception ends it. A reader that may wait
  /// for long looks at it, or registers a std::stop_callback, and then returns; what it returns is dropped.
  std::stop_token stop = {};
};

/// What a stream gives at a time: a row as a JSON object of numbers, booleans and arrays of them, or a Batch of any
/// number of rows, whose tensors are its own from then on.
class StreamRows {
 public:
  template <std::same_as<Json> Row>
  StreamRows(Row row) : rows_(std::move(row)) {}
  StreamRows(Batch rows) : rows_(std::move(rows)) {}

  std::variant<Json, Batch> take() && { return std::move(rows_); }

 private:
  std::variant<Json, Batch> rows_;
};

/// Gives the next rows of a share, none at its end.
using StreamReader = std::function<std::optional<StreamRows>()>;
/// Begins a share.
using MakeStream = std::function<StreamReader(const StreamShard&)>;

/// A handle to a dataset; copies are cheap and share it. Files are opened at first use and checked whole then (an Error
/// with ExitCode::data). The same on all ranks: count, columns, sizes and some blocks are compared before training.
class Dataset {
 public:
  /// "FILE.h5" or "FILE.h5:/group".
  Dataset(const char* path);
  Dataset(const std::string& path);
  Dataset(const std::filesystem::path& path);

  /// Several files are one dataset, in that order; their columns must agree.
  static Dataset from_hdf5(std::vector<std::string> paths, DatasetOptions options = {});
  /// In memory. All tensors have the same first dimension, and the same values on all ranks.
  static Dataset from_tensors(std::vector<std::pair<std::string, at::Tensor>> columns);
  /// In memory, row by row: a list of JSON objects with the same keys, which are the columns in the order of names, or
  /// of plain values, which make one column "item" (from_items({1, 2, 3})). Values are numbers, booleans, or arrays of
  /// them, of the same shape in every row: a number makes a column [rows]. Whole numbers become int64, others float64,
  /// as in Ray and NumPy; BatchOptions::dtypes makes float32 of them. The same rows on all ranks.
  static Dataset from_items(const Json& items);
  /// Rows that come one after the other and have no index: lines of a socket, what a simulation makes, files in a
  /// format of one's own. In every pass `make` is called on each worker, and gives a function that gives the rows of
  /// that worker's share, JSON objects or Batches, until it gives none. That function is called on another thread,
  /// which reads ahead, and what it throws ends training on all workers.
  ///
  /// All rows have the same columns, types and shapes. The first row of JSON settles the types: whole numbers make
  /// int64, other numbers float64. Whole numbers may follow in a column of float64. A float in a column of int64 is an
  /// Error (ExitCode::data), unless BatchOptions::dtypes makes a floating type of that column.
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
  /// All workers take as many steps: before each they agree on how many rows it has, so a split stream's passes, those
  /// that do not train too, are collective. A worker whose rows have come to an end has a batch of weight 0, as a rank
  /// that is left empty has (Batch::size), and a pass ends when nobody has rows. A stream that is not split is asked
  /// for by each worker as the only one.
  ///
  /// A reader that waits should look at StreamShard::stop. A pass that is left while its reader is in a call waits for
  /// that call, at most for the job's --timeout; after that the job ends (ExitCode::retry).
  ///
  /// A position in a stream is not known. So a State is reported, and a stop is obeyed, when the pass is over; a run
  /// that goes on, at any number of workers, begins with a new pass. What needs a count or an index is an Error
  /// (ExitCode::usage): count(), schema(), read(), fitting a preprocessor (a fitted one is applied), `shuffle`,
  /// `local_shuffle_buffer_size`, ScalingConfig::virtual_workers.
  static Dataset from_stream(MakeStream make);

  /// Samples.
  std::int64_t count() const;
  /// Columns in order.
  Schema schema() const;
  /// The samples of those indices (0 ≤ i < count(), any order, repeats allowed), in that order. Random numbers of a
  /// preprocessor depend on the first index alone.
  Batch read(std::span<const std::int64_t> samples) const;
  /// Every batch goes through `preprocessor` (already fitted) after it was read. An Error (ExitCode::data) where the
  /// batch then has another number of rows.
  Dataset transform(std::shared_ptr<const Preprocessor> preprocessor) const;

  const std::shared_ptr<detail::data::Source>& source() const noexcept { return source_; }

 private:
  explicit Dataset(std::shared_ptr<detail::data::Source> source);
  std::shared_ptr<detail::data::Source> source_;
};

/// The types that columns are converted to: one for all columns, or one for each that is named.
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

  /// The type of all columns, if there is one.
  const std::optional<at::ScalarType>& all() const noexcept { return all_; }
  /// The columns that are named.
  const Named& named() const noexcept { return named_; }
  /// The type that the column becomes; none if it keeps its own.
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
  /// Samples per step over all workers, in place of batch_size: the same at any number of workers, among whom they are
  /// divided as evenly as they go.
  std::optional<std::int64_t> global_batch_size = {};
  /// Whether a pass over a split dataset trains: its batches weigh gradients, count as steps and samples, and it is
  /// part of the epoch that a stopped run goes on with. All workers take them alike, batch by batch, and may stop
  /// between two (see Session). A pass that begins while no gradients are recorded (torch::NoGradGuard,
  /// session.evaluation) never does.
  bool training = true;
  /// A permutation of the whole dataset, another one in each pass of each epoch, drawn from the run's seed.
  bool shuffle = false;
  /// Leaves out the last step of an epoch if it is not full; of a stream each worker its last batch.
  bool drop_last = false;
  /// Batches that are read ahead.
  int prefetch_batches = 1;
  /// Shuffles within stretches of so many samples per worker: cheaper for the disk than `shuffle`.
  std::optional<std::int64_t> local_shuffle_buffer_size = {};
  /// Seed of the local shuffle, and only with one; the run's unless given.
  std::optional<std::uint64_t> local_shuffle_seed = {};
  /// Converts columns after reading, as in {{"x", at::kFloat}}, or all columns, as in at::kFloat.
  ColumnTypes dtypes = {};
  /// Where the batches go; the session's device unless given.
  std::optional<at::Device> device = {};
};
void to_json(Json& json, const BatchOptions& options);
void from_json(const Json& json, BatchOptions& options);

/// One pass over a shard, which begins with begin() and ends with its last batch, or with the range. Owns what it
/// iterates; begin() once. An error in reading (muster::Error with ExitCode::data, or what a preprocessor
/// throws) is thrown by begin() or ++, in the place of the batch, and again by each ++ after it.
class BatchRange {
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
  /// Batches of this pass on this worker, or of that which would begin now; one a step unless it takes several
  /// micro-batches of each (ScalingConfig::virtual_workers). Those before a resumed position are left out. An Error for
  /// a stream.
  std::int64_t num_batches() const;

 private:
  std::unique_ptr<detail::data::BatchStream> stream_;
};

/// What a worker sees of a dataset: its share of each step if the dataset is split, else all of it.
///
/// In a split dataset step s takes the next workers × batch_size samples of one order f(seed, epoch, pass), the same on
/// all ranks; the samples of the last step are divided evenly. So every sample comes once, all ranks run the same
/// number of steps, and a position is one number. A report inside a training pass counts the batch in hand as taken;
/// resumed, at any number of workers, the training passes of that epoch that were finished come back empty and that one
/// goes on after it. What was done inside one batch of another pass, as is validation every so many steps, is not done
/// again, and the next such pass is whole. A dataset that is whole on each worker has no position: its passes are
/// always whole, and do not make an epoch. A shard belongs to the thread that runs the training function.
///
/// Passes inside the loop over session.epochs() and passes outside of it are counted apart. So statistics before the
/// loop, at every start or on a fresh one alone, change nothing in where a run goes on. Inside the loop an epoch makes
/// the same passes at every start; an epoch that ends before the pass in whose middle the run was saved is an Error.
///
/// Between two starts the number of workers, batch sizes and `shuffle` may change: a pass in the middle is brought to
/// its end in the order that it began with, and the next one has the new order. The names of datasets and the number of
/// their samples stay.
///
/// Only one training pass over a shard can be saved at a time. A report with a State is an Error while another one has
/// begun before the first was over (two side by side, or one inside a batch of the other), and no stop is obeyed there.
/// Two names for the same data in the trainer's datasets have a position each; an inner pass that is begun with
/// `.training = false` or under torch::NoGradGuard has none, and session.step(batch) still weighs its batches.
class DatasetShard {
 public:
  explicit DatasetShard(std::shared_ptr<detail::data::ShardState> state);

  /// Batches on the session's device, with `dtypes` applied.
  BatchRange iter_torch_batches(BatchOptions options = {}) const;
  /// Batches as stored: on the CPU, types kept; `dtypes` and `device` are ignored.
  BatchRange iter_batches(BatchOptions options = {}) const;

  /// Fixes the epoch that seeds the order; session.epochs() does it, a loop of one's own calls this: without it all its
  /// passes are those of one epoch. The session is in that epoch then, and with it every shard whose epoch has never
  /// been set. Inside session.epochs() an Error (ExitCode::usage) for another epoch than the loop's.
  void set_epoch(std::int64_t epoch) const;

  /// Samples of the whole dataset.
  std::int64_t count() const;
  Schema schema() const;

 private:
  std::shared_ptr<detail::data::ShardState> state_;
};

}  // namespace muster
