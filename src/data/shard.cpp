#include "data/shard.hpp"

#include "base/log.hpp"
#include "data/batches.hpp"
#include "data/source.hpp"
#include "muster/error.hpp"

#include <limits>

namespace muster {
namespace data {
namespace {

std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max() : product;
}

void check(const std::string& name, const BatchOptions& options) {
  const auto require = [&](bool holds, const char* option, const char* least) {
    if (!holds)
      throw Error(ExitCode::usage, "iterating over dataset \"" + name + "\"",
                  std::string(option) + " is less than " + least, std::string("Give at least ") + least);
  };
  require(options.batch_size >= 1, "batch_size", "1");
  require(options.global_batch_size.value_or(1) >= 1, "global_batch_size", "1");
  require(options.local_shuffle_buffer_size.value_or(1) >= 1, "local_shuffle_buffer_size", "1");
  require(options.prefetch_batches >= 0, "prefetch_batches", "0");
}

}  // namespace

void ShardState::begin_epoch(std::int64_t value) {
  if (value == epoch) return;
  epoch = value;
  passes = replays = consumed = 0;
  under_way = false;
}

bool ShardState::unfinished() const noexcept { return split && (under_way || consumed > 0); }

Config ShardState::position() const {
  if (!split) return nullptr;
  return {{"epoch", epoch},
          {"passes", passes},
          {"consumed", consumed},
          {"window", window},
          {"global_batch_size", global_batch},
          {"samples", samples},
          {"seed", seed}};
}

void ShardState::restore(const Config& position) {
  if (position.is_null()) return;
  try {
    epoch = position.at("epoch");
    replays = passes = position.at("passes");
    consumed = position.at("consumed");
    window = position.at("window");
    global_batch = position.at("global_batch_size");
    samples = position.at("samples");
    seed = position.at("seed");
    under_way = false;
  } catch (const Config::exception& error) {
    throw Error(ExitCode::data, "restoring the position in dataset \"" + name + "\"", error.what(),
                "Resume from another checkpoint");
  }
}

Pass ShardState::begin_pass(const BatchOptions& options) {
  check(name, options);
  const std::int64_t count = dataset.count();
  const StepShare whole;
  const auto& mine = split ? share : whole;
  const int workers = mine.total;
  if (under_way) {
    ++passes;
    consumed = 0;
  }
  under_way = false;
  const auto per_worker = split || !options.global_batch_size
                              ? options.batch_size
                              : (*options.global_batch_size + share.total - 1) / share.total;
  const auto batch = split && options.global_batch_size ? *options.global_batch_size : times(per_worker, workers);
  if (replays > 0) {
    --replays;
    return {Order(count, {}), count, batch, mine, options.drop_last, 0};
  }
  if (consumed > 0) {
    if (samples != count)
      throw Error(ExitCode::data, "continuing in dataset \"" + name + "\"",
                  "it has " + std::to_string(count) + " samples and had " + std::to_string(samples) +
                      " when the checkpoint was saved",
                  "Resume with the same files, or start a new run");
    if (!options.global_batch_size && batch != global_batch)
      log::warn("dataset \"" + name + "\": a step now takes " + std::to_string(batch) + " samples over " +
                std::to_string(workers) + " workers, it took " + std::to_string(global_batch) +
                " before the restart; global_batch_size keeps it the same at any number of workers");
  } else {
    window = options.local_shuffle_buffer_size ? times(*options.local_shuffle_buffer_size, workers) : 0;
  }
  samples = count;
  global_batch = batch;
  under_way = true;
  const OrderOptions order{.shuffle = options.shuffle,
                           .window = window,
                           .seed = seed,
                           .window_seed = options.local_shuffle_seed.value_or(seed),
                           .epoch = epoch,
                           .pass = passes};
  return {Order(count, order), consumed, batch, mine, options.drop_last, ++ticket};
}

void ShardState::take(const Pass& pass, const Batch& batch, int shard) {
  if (split && weight) *weight = {batch.size(), batch.global_size(), shard, pass.share.count, weight->batch + 1};
  const bool completes_step = shard + 1 == pass.share.count;
  if (completes_step && under_way && pass.ticket == ticket) consumed += batch.global_size();
  if (split && on_batch) on_batch(batch.global_size());
}

void ShardState::end_pass(const Pass& pass) {
  if (split && weight) *weight = {.batch = weight->batch};
  if (split && on_end) on_end();
  if (!under_way || pass.ticket != ticket) return;
  under_way = false;
  ++passes;
  consumed = 0;
}

}  // namespace data

DatasetShard::DatasetShard(std::shared_ptr<data::ShardState> state) : state_(std::move(state)) {}

BatchRange DatasetShard::iter_torch_batches(BatchOptions options) const {
  if (!options.device) options.device = state_->device;
  return BatchRange(std::make_unique<data::BatchStream>(state_, options));
}

BatchRange DatasetShard::iter_batches(BatchOptions options) const {
  options.device.reset();
  options.dtypes.clear();
  return BatchRange(std::make_unique<data::BatchStream>(state_, options));
}

void DatasetShard::set_epoch(std::int64_t epoch) const {
  state_->begin_epoch(epoch);
  if (state_->on_epoch) state_->on_epoch(epoch);
}

std::int64_t DatasetShard::count() const { return state_->dataset.count(); }

Schema DatasetShard::schema() const { return state_->dataset.schema(); }

}  // namespace muster
