// Where a dataset's samples come from: memory, HDF5 files, another source through a preprocessor.
#pragma once

#include "data/passes/samples.hpp"
#include "data/sources/fingerprint.hpp"
#include "muster/dataset.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// A batch that one thread reads for another.
struct ReadBatch {
  ReadBatch(Batch read, std::function<void(Batch&)> rest = {}) : batch(std::move(read)), finish(std::move(rest)) {}

  Batch batch;
  std::function<void(Batch&)> finish;  ///< what is left to do, on the thread that asked for the batch; may be empty
};

/// Gives one batch after the other, none at the end.
using BatchReader = std::function<std::optional<ReadBatch>()>;

/// How a worker reads its share of a stream.
struct StreamPlan {
  std::int64_t rows = 1;    ///< of a batch
  Order order;              ///< of which random_seed() gives the preprocessors' seeds
  ColumnTypes dtypes = {};  ///< that columns are converted to afterwards
};

/// Columns that can be read by the sample. Thread-safe; errors are muster::Error with ExitCode::data, or
/// ExitCode::retry where the disk could not be read.
class Source {
 public:
  virtual ~Source() = default;
  /// Samples, at least one.
  virtual std::int64_t count() = 0;
  virtual const Schema& schema() = 0;
  /// The samples at those indices (0 ≤ i < count()), in that order, in tensors that own their memory.
  virtual Batch read(std::span<const std::int64_t> samples) = 0;
  /// The same on a thread that reads ahead; preprocessors draw random numbers from that seed.
  virtual ReadBatch read_ahead(std::span<const std::int64_t> samples, std::uint64_t /*seed*/) { return read(samples); }
  /// What must be the same on all ranks.
  virtual Fingerprint fingerprint() = 0;
  /// What errors call it.
  virtual std::string shown() const = 0;
  /// Whether somebody has given the columns in their order. The columns of a file and the keys of JSON objects come in
  /// the order of their names. Of a stream: as far as rows were read.
  virtual bool has_column_order() const noexcept { return true; }

  /// A stream: samples have no indices, and all there is of it is open(); count(), schema() and read() are Errors.
  virtual bool is_stream() const noexcept { return false; }
  /// Of a stream: the worker's share in batches of plan.rows, the last of what is left.
  virtual BatchReader open(const StreamShard&, const StreamPlan&) { return {}; }
};

/// The tensors themselves, not copies. `ordered`: has_column_order().
std::shared_ptr<Source> memory_source(std::vector<Batch::Item> columns, bool ordered = true);
/// The files one after the other; opened and checked at the first call of a member.
std::shared_ptr<Source> hdf5_source(std::vector<std::string> paths, DatasetOptions options);
/// What `make` gives to each worker.
std::shared_ptr<Source> stream_source(MakeStream make);
/// What `preprocessor` makes of each batch of `source`, whose own preprocessors come first.
std::shared_ptr<Source> transformed_source(std::shared_ptr<Source> source,
                                           std::shared_ptr<const Preprocessor> preprocessor);

/// Gives uninitialised tensors on the CPU; thread-safe. Large ones come from memory given before that no tensor (view,
/// or what autograd has saved) holds any more: fresh pages cost the kernel more than reading into them.
class TensorPool {
 public:
  at::Tensor take(at::IntArrayRef shape, at::ScalarType dtype);

 private:
  std::mutex mutex_;
  std::vector<c10::Storage> storages_;
};

/// The columns of a batch.
Schema schema_of(const Batch& batch);
/// "Float[3]", for errors.
std::string describe(const Column& column);
/// "x Float[3], y Long[]".
std::string described(const Schema& schema);
/// "x, y": what `text` says of each.
template <class Items, class Text = std::identity>
std::string joined(const Items& items, const Text& text = {}) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ", ") + std::invoke(text, item);
  return all;
}
/// The column of that name; an Error that lists the columns if there is none.
const Column& column_of(Source& source, const std::string& name, const std::string& doing);

}  // namespace muster::detail::data
