// The batches of a stream, and of a dataset that draws its samples itself. Each worker reads its own rows; before each
// step the workers agree on how many rows it has.
#include "base/json.hpp"
#include "base/text.hpp"
#include "comm/agreement.hpp"
#include "comm/rank_status.hpp"
#include "data/passes/batch_conversion.hpp"
#include "data/passes/batch_options.hpp"
#include "data/passes/batches.hpp"
#include "data/preprocess/apply.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"
#include "watch/record.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::data {
namespace {

std::vector<Batch::Item> first_row(const Batch& batch) {
  std::vector<Batch::Item> row;
  for (const auto& [name, tensor] : batch) row.emplace_back(name, tensor.narrow(0, 0, 1).clone());
  return row;
}

std::string pack_row(const std::vector<Batch::Item>& row) {
  auto all = Json::array();
  for (const auto& [name, tensor] : row) {
    const auto values = tensor.cpu().contiguous();
    const auto* const first = static_cast<const std::uint8_t*>(values.const_data_ptr());
    all.push_back({name, static_cast<int>(values.scalar_type()), values.sizes().vec(),
                   Json::binary({first, first + values.nbytes()})});
  }
  return json_to_cbor(all);
}

std::vector<Batch::Item> unpack_row(const std::string& packed, std::optional<at::Device> device) {
  std::vector<Batch::Item> row;
  for (const auto& column : json_from_cbor(packed)) {
    const auto tensor =
        at::empty(column[2].get<std::vector<std::int64_t>>(), static_cast<at::ScalarType>(column[1].get<int>()));
    const auto& bytes = column[3].get_binary();
    std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    row.emplace_back(column[0], tensor.to(device.value_or(at::kCPU)));
  }
  return row;
}

class StreamBatches : public BatchStream {
 public:
  StreamBatches(std::shared_ptr<ShardState> of, const BatchOptions& options, PassData data = {})
      : BatchStream(std::move(of), options, std::move(data)) {
    const auto refuse = [&](const std::string& fact, const std::string& remedy) {
      throw Error(ExitCode::usage, doing(), fact, remedy);
    };
    const auto& share = shard().options().share;
    const char* const set = options.shuffle                     ? "shuffle"
                            : options.local_shuffle_buffer_size ? "local_shuffle_buffer_size"
                            : options.weights.defined()         ? "weights"
                            : options.bucket_samples            ? "bucket_samples"
                                                                : "";
    if (*set != '\0')
      refuse(str(set, " is set, but a stream gives its rows in its own order"), "Order them where they are made");
    check_options(options, doing());
    if (shard().options().split && share.fixed)
      refuse("it is a stream, and virtual_workers can only divide samples that have an index",
             "Use a dataset of files, tensors or items, or no virtual_workers");
    if (shard().options().split && options.global_batch_size.value_or(share.total) < share.total)
      refuse("global_batch_size is less than the number of workers, and each worker of a stream reads its own rows",
             str("Give at least ", share.total));
  }

  std::int64_t num_batches() const override {
    throw Error(ExitCode::usage, "counting the batches of dataset \"" + shard().options().name + "\"",
                "it is a stream, and its number of rows is not known", "Iterate until it ends");
  }

 protected:
  /// Adds the conversion of the pass to the work on a batch.
  static void convert(ReadBatch& read, const BatchConversion& conversion, const BatchOptions& options) {
    conversion.add_to(read, [options](std::vector<Batch::Item> columns) {
      Batch all(std::move(columns));
      // Throws an Error if a column is missing.
      for (const auto& dtype : options.dtypes.named()) static_cast<void>(all[dtype.first]);
      return all;
    });
  }

 private:
  std::unique_ptr<Prefetch> open(const Pass& pass) override {
    const auto prefetch = [&](Prefetch::Produce read, std::optional<SlowReader> slow = {}) {
      return std::make_unique<Prefetch>(std::move(read), options().prefetch_batches,
                                        source_of(shard().dataset)->threads(), std::move(slow));
    };
    if (pass.is_already_finished) return prefetch([]() -> std::optional<ReadBatch> { return {}; });
    const bool split = shard().options().split;
    if (split && pass.plan.global_batch < pass.share.total)
      throw Error(
          ExitCode::usage, doing(),
          str("a step has fewer rows (", pass.plan.global_batch, ", as before the restart) than there are workers (",
              pass.share.total, "), and each worker of a stream reads its own rows"),
          str("Start fewer workers, or give a global_batch_size of at least ", pass.share.total));
    const auto rows = share_of(pass.plan.global_batch, pass.share.total, pass.share.first).count;
    SlowReader slow{.dataset = shard().options().name, .stop = {}, .communicator = shard().workers};
    StreamShard mine{.epoch = pass.epoch, .stop = slow.stop.get_token()};
    if (split) {
      mine.worker = pass.share.first;
      mine.workers = pass.share.total;
    }
    mine.generator = make_generator(pass.order.random_seed(-1 - mine.worker));
    const auto seed = [order = pass.order](std::int64_t number) { return order.random_seed(number); };
    auto read =
        [next = source_of(shard().dataset)->open(mine, {.rows = rows, .random_seed = seed, .dtypes = options().dtypes}),
         rows, options = options(), conversion = BatchConversion(options())]() -> std::optional<ReadBatch> {
      const at::NoGradGuard no_grad;
      auto batch = next();
      if (!batch || (options.drop_last && batch->batch.size() < rows)) return {};
      convert(*batch, conversion, options);
      return batch;
    };
    return prefetch(std::move(read), std::move(slow));
  }

  std::optional<Batch> take(Prefetch& batches) override {
    auto mine = batches.next();
    if (!shard().options().split) return mine;
    const watch::ScopedCallName agree("agreeing on the next step of a stream");
    const auto& workers = shard().workers;
    if (number_ == 0) begin(mine);
    const auto rows = mine ? mine->size() : 0;
    const auto all = workers ? workers->all_reduce(rows) : rows;
    if (all == 0) return {};
    const auto of = pass();
    auto weight = std::make_shared<step::BatchWeight>(step::BatchWeight{
        .local = rows, .global = all, .number = (of.number << 32) + ++number_, .total = of.share.total});
    auto items = mine ? std::vector<Batch::Item>(mine->begin(), mine->end()) : first_row(Batch(padding_row_));
    return Batch(std::move(items), rows, all, std::move(weight));
  }

  /// Compares the columns of all workers. Each worker keeps one row as padding for steps in which it has none: a row of
  /// its own, or another worker's if it has no rows at all.
  void begin(const std::optional<Batch>& mine) {
    if (mine) padding_row_ = first_row(*mine);
    const auto& workers = shard().workers;
    if (!workers) return;
    const auto columns = workers->all_gather(schema_text(schema_of(Batch(padding_row_))));
    const auto has_rows = [](const std::string& text) { return !text.empty(); };
    const auto first = std::ranges::find_if(columns, has_rows);
    if (first == columns.end()) return;
    for (auto other = first; other != columns.end(); ++other)
      if (has_rows(*other) && *other != *first)
        throw Error(ExitCode::data, doing(),
                    str("its columns are ", *first, " on worker ", first - columns.begin(), " and ", *other,
                        " on worker ", other - columns.begin()),
                    "Give the same columns, types and shapes on every worker; BatchOptions::dtypes converts different "
                    "types to one");
    if (std::ranges::all_of(columns, has_rows)) return;
    const auto root = static_cast<int>(first - columns.begin());
    const auto row = workers->broadcast(workers->rank() == root ? pack_row(padding_row_) : "", root);
    if (!mine) padding_row_ = unpack_row(row, options().device);
  }

  std::vector<Batch::Item> padding_row_;
  std::int64_t number_ = 0;  ///< number of the batch in hand in its pass, from 1
};

/// Draws the rank's samples of each step. No batch is drawn ahead, so that the source's state is that of the batch in
/// hand.
class DrawnBatches final : public StreamBatches {
 public:
  DrawnBatches(const std::shared_ptr<ShardState>& of, const BatchOptions& options)
      : StreamBatches(of, options, {.count = source_of(of->dataset)->count()}) {}

  std::int64_t num_batches() const override { return pass().num_steps(); }

 private:
  std::unique_ptr<Prefetch> open(const Pass& begun) override {
    auto draw = [source = source_of(shard().dataset), pass = begun, steps_left = begun.num_steps(), options = options(),
                 conversion = BatchConversion(options()), between = between()]() mutable -> std::optional<ReadBatch> {
      if (steps_left-- <= 0) return {};
      const auto step =
          step_at(pass.position, pass.order.size(), pass.plan.global_batch, pass.share.total, pass.share.first);
      pass.position += step.samples;
      if (step.mine.count == 0) return {};  // the last step has no samples for this rank
      const at::NoGradGuard no_grad;
      auto read = source->draw(step.mine.count, pass.order.random_seed(step.mine.first), between);
      if (read) convert(*read, conversion, options);
      return read;
    };
    return std::make_unique<Prefetch>(std::move(draw), /*ahead=*/0);
  }

  /// What is done while a rank waits for samples: other ranks see why, and their failures end the wait.
  std::function<void()> between() const {
    if (!shard().workers) return [] {};
    return [workers = *shard().workers] {
      const comm::WaitingForReader waiting(workers);
      comm::throw_if_alarm_raised(workers);
    };
  }
};

}  // namespace

std::unique_ptr<BatchStream> open_stream_batches(std::shared_ptr<ShardState> shard, const BatchOptions& options) {
  if (shard->options().stream) return std::make_unique<StreamBatches>(std::move(shard), options);
  return std::make_unique<DrawnBatches>(shard, options);
}

}  // namespace muster::detail::data
