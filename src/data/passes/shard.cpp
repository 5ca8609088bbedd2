#include "data/passes/shard.hpp"

#include "data/passes/batches.hpp"
#include "muster/error.hpp"

namespace muster {
namespace detail::data {

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
  if (options.local_shuffle_seed && !options.local_shuffle_buffer_size)
    throw Error(ExitCode::usage, "iterating over dataset \"" + name + "\"",
                "local_shuffle_seed is given and there is no local shuffle", "Give local_shuffle_buffer_size too");
}

}  // namespace detail::data

DatasetShard::DatasetShard(std::shared_ptr<detail::data::ShardState> state) : state_(std::move(state)) {}

BatchRange DatasetShard::iter_torch_batches(BatchOptions options) const {
  if (!options.device) options.device = state_->device;
  return BatchRange(std::make_unique<detail::data::BatchStream>(state_, options));
}

BatchRange DatasetShard::iter_batches(BatchOptions options) const {
  options.device.reset();
  options.dtypes.clear();
  return BatchRange(std::make_unique<detail::data::BatchStream>(state_, options));
}

void DatasetShard::set_epoch(std::int64_t epoch) const { state_->set_epoch(epoch); }

std::int64_t DatasetShard::count() const { return state_->dataset.count(); }

Schema DatasetShard::schema() const { return state_->dataset.schema(); }

}  // namespace muster
