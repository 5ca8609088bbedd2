// The sources of a dataset's samples: memory, HDF5 files, a stream, some samples of another source.
#pragma once

#include "base/export.hpp"
#include "data/sources/ahead.hpp"
#include "data/sources/fingerprint.hpp"
#include "data/sources/sample_layout.hpp"
#include "muster/communicator.hpp"
#include "muster/dataset.hpp"
#include "muster/json.hpp"

#include <ATen/core/Generator.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

class NodeChunks;

/// A piece of work, the same for all batches of a pass. May be called for several batches at once.
struct BatchWork {
  /// Works on the batch, with the batch's generator. `ahead`: true on another thread than the one that iterates. Then
  /// the function may return false and leave the batch unchanged; the thread that iterates calls it again.
  std::function<bool(Batch& batch, at::Generator& generator, bool ahead)> run;
  /// At most this many batches of a pass are in this work at once; with 1, one after the other in order. Empty: as many
  /// as the pass has threads.
  std::optional<int> threads = {};
};

/// A batch that was read.
struct ReadBatch {
  ReadBatch(Batch read) : batch(std::move(read)) {}

  Batch batch;
  at::Generator generator = {};     ///< for its preprocessors and functions; undefined if it has none
  std::deque<BatchWork> work = {};  ///< what is left to do, in order
};

/// Each call returns the next batch, or none at the end.
using BatchReader = std::function<std::optional<ReadBatch>()>;

/// How a worker reads its share of a stream.
struct StreamPlan {
  std::int64_t rows = 1;  ///< rows of a batch
  /// The seed for the preprocessors of a batch, by its number among those of all workers.
  std::function<std::uint64_t(std::int64_t)> random_seed = {};
  ColumnTypes dtypes = {};  ///< the types to which columns are converted later
};

/// Columns whose samples can be read by index. Thread-safe. Throws Errors with ExitCode::data, ExitCode::usage if the
/// options do not suit the data, or ExitCode::retry if the disk could not be read.
class Source {
 public:
  virtual ~Source() = default;
  /// The number of samples, at least one.
  virtual std::int64_t count() = 0;
  virtual const Schema& schema() = 0;
  /// Reads the samples with the indices `samples` (each 0 ≤ i < count()), in that order. The tensors own their memory.
  virtual Batch read(std::span<const std::int64_t> samples) = 0;
  /// Like read(), but leaves the work of preprocessors and functions to the caller. They draw their random numbers from
  /// `seed`.
  virtual ReadBatch read_ahead(std::span<const std::int64_t> samples, std::uint64_t /*seed*/) { return read(samples); }
  /// The largest number of threads that a preprocessor or function of the dataset was given, at least 1.
  virtual int threads() const noexcept { return 1; }
  /// Prepares to read all samples that are stored in the same blocks as `samples`.
  virtual void expect(std::span<const std::int64_t> /*samples*/, Ahead /*how*/) {}
  /// How the samples are stored, if it costs much to read them in another order than block by block.
  virtual Blocks blocks() { return {}; }
  /// The length of each sample, for samples of different length; otherwise null.
  virtual std::shared_ptr<const Lengths> lengths() { return nullptr; }
  /// The encoded chunks that ranks of a node may keep together: all of them fit into memory. Null if there are none.
  virtual NodeChunks* node_chunks() { return nullptr; }
  /// Ends the threads that read and decode the samples, until they are needed again.
  virtual void end_threads() {}
  /// Must be the same on all ranks.
  virtual DatasetFingerprint fingerprint() = 0;
  /// The source's name in errors.
  virtual std::string shown() const = 0;
  /// The files that it reads.
  virtual std::vector<std::string> files() const { return {}; }
  /// True if the user has chosen the order of the columns. False if they are in the order of their names, as the
  /// columns of a file and the keys of JSON objects are. For a stream this depends on the rows read so far.
  virtual bool has_column_order() const noexcept { return true; }

  /// True for a source that chooses its samples itself, other ones on each rank, such as a reservoir. A pass takes them
  /// by draw(); count() is how many a pass draws over all workers, and read() looks at samples without drawing them.
  virtual bool draws() const noexcept { return false; }
  /// Draws the next `count` samples; fewer, or none, if no more will come. Calls `between` from time to time while it
  /// waits for them. `seed` as in read_ahead().
  virtual std::optional<ReadBatch> draw(std::int64_t /*count*/, std::uint64_t /*seed*/,
                                        const std::function<void()>& /*between*/) {
    return {};
  }
  /// For a source that draws: what the row of a report says about its samples, by its name; null if another source says
  /// it. Collective.
  virtual Json ledger(const Communicator& /*workers*/) { return {}; }
  /// For a source that draws: the samples of this rank on which a preprocessor is fitted, as many on each rank.
  virtual std::shared_ptr<Source> to_fit() { return nullptr; }

  /// True for a stream. Its samples have no indices: it is read with open(), and count(), schema() and read() throw an
  /// Error.
  virtual bool is_stream() const noexcept { return false; }
  /// For a stream: opens the worker's share, in batches of plan.rows; the last batch may be smaller.
  virtual BatchReader open(const StreamShard&, const StreamPlan&) { return {}; }
};

/// A source of the tensors themselves, not of copies. `ordered`: has_column_order().
std::shared_ptr<Source> memory_source(std::vector<Batch::Item> columns, bool ordered = true);
/// A source of the samples of all files, in the order of `paths`. Files are opened and checked at the first call that
/// needs them.
std::shared_ptr<Source> hdf5_source(std::vector<std::string> paths, DatasetOptions options);
/// A source of windows of variables, each "FILE:/NAME". Files are opened and checked at the first call that needs them.
std::shared_ptr<Source> window_source(std::vector<std::string> variables, WindowOptions options);
/// A source of the samples of different length of all files, in the order of `paths`. Files are opened and checked at
/// the first call that needs them.
std::shared_ptr<Source> ragged_source(const std::vector<std::string>& paths, RaggedOptions options);
/// A source of the rows that the reader from `make` returns on each worker.
std::shared_ptr<Source> stream_source(MakeStream make);

/// A source of the samples `samples` of `source`, in that order. Opens the source to check them.
std::shared_ptr<Source> subset_source(std::shared_ptr<Source> source, std::vector<std::int64_t> samples);
/// Sources of random parts of `source`, one for each fraction.
std::vector<std::shared_ptr<Source>> split_source(const std::shared_ptr<Source>& source,
                                                  std::span<const double> fractions, std::uint64_t seed);

/// Makes uninitialised tensors on the CPU; thread-safe. Large tensors may reuse memory of earlier ones of their size,
/// once no tensor, view or autograd graph holds it: for the kernel, providing fresh pages costs more than reading into
/// them.
class TensorPool {
 public:
  at::Tensor take(at::IntArrayRef shape, at::ScalarType dtype);

 private:
  std::mutex mutex_;
  std::vector<c10::Storage> storages_;
};

/// The columns of a batch.
MUSTER_INTERNAL_API Schema schema_of(const Batch& batch);
/// True if samples of the column have different sizes.
MUSTER_INTERNAL_API bool is_ragged(const Column& column) noexcept;
/// The bytes of a sample, at least 1. Columns whose samples have different sizes are left out.
std::int64_t row_bytes(const Schema& schema) noexcept;
/// "Float[3]", for errors.
std::string column_text(const Column& column);
/// "x Float[3], y Long[]".
MUSTER_INTERNAL_API std::string schema_text(const Schema& schema);
/// "x, y": `text` applied to each item, joined by commas.
template <class Items, class Text = std::identity>
std::string joined(const Items& items, const Text& text = {}) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ", ") + std::invoke(text, item);
  return all;
}
/// The column `name`. Throws an Error that lists the columns if there is none.
MUSTER_INTERNAL_API const Column& column_of(Source& source, const std::string& name, const std::string& doing);

}  // namespace muster::detail::data
