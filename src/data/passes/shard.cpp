#include "data/passes/shard.hpp"

#include "data/passes/batches.hpp"

namespace muster {

DatasetShard::DatasetShard(std::shared_ptr<detail::data::ShardState> state) : state_(std::move(state)) {}

BatchRange DatasetShard::iter_torch_batches(BatchOptions options) const {
  if (!options.device) options.device = state_->device;
  return BatchRange(detail::data::open_batches(state_, options));
}

BatchRange DatasetShard::iter_batches(BatchOptions options) const {
  return BatchRange(detail::data::open_batches(state_, options));
}

void DatasetShard::set_epoch(std::int64_t epoch) const { state_->set_epoch(epoch); }

std::int64_t DatasetShard::count() const { return state_->dataset.count(); }

Schema DatasetShard::schema() const { return state_->dataset.schema(); }

}  // namespace muster
