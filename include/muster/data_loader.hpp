// torch's own data loader over torch's own datasets, divided among the workers.
//
//   auto loader = muster::prepare_data_loader(session, dataset.map(torch::data::transforms::Stack<>()),
//                                             {.batch_size = 64, .shuffle = true});
//   for (auto epoch : session.epochs(10)) {
//     loader->set_epoch(epoch);
//     for (auto& batch : *loader) …                      // on the session's device
//   }
//
// Samples are divided as DatasetShard divides them: every sample once per epoch, the same number of steps on every
// worker, the last one divided evenly. Passes count as a shard's do (see BatchOptions::training), and a stopped run
// goes on in the middle of one, by the loader's name: what counts is what was taken, not what was read ahead.
#pragma once

#include <muster/detail/data_loader.hpp>
#include <muster/json.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace muster {

class Session;

struct DataLoaderOptions {
  /// Under which its position is saved. Loaders of which training passes are under way together have different ones,
  /// and so have a loader and a dataset.
  std::string name = "train_loader";
  /// Samples per worker and step.
  std::size_t batch_size = 256;
  /// Samples per step over all workers, in place of batch_size. An error with a sampler of one's own.
  std::optional<std::size_t> global_batch_size = {};
  /// A permutation of the whole dataset, another one in each pass of each epoch. An error with a sampler of one's
  /// own.
  bool shuffle = false;
  /// Leaves out the last step of a pass if it is not full.
  bool drop_last = false;
  /// As BatchOptions::training.
  bool training = true;
  /// Threads that read, each with its own copy of the dataset; with 0 the one that iterates.
  std::size_t workers = 0;
  /// How long to wait for them; without end unless given.
  std::optional<std::chrono::milliseconds> timeout = {};
};
void to_json(Json& json, const DataLoaderOptions& options);
void from_json(const Json& json, DataLoaderOptions& options);

/// Made by prepare_data_loader, for the thread that runs the training function. begin() begins a pass; one at a time,
/// and one that is left early may be followed by another.
template <class Dataset>
class DataLoader : public detail::data::Loader<Dataset> {
 public:
  using detail::data::Loader<Dataset>::Loader;

  /// Fixes the epoch that seeds the order. The passes of one epoch have different orders too.
  void set_epoch(std::int64_t epoch) { this->sampler_->set_epoch(epoch); }
  /// Samples of the batch in hand that count: 0 where a worker is left empty in the last step and got a sample of
  /// somebody else's, which its gradient leaves out and so should a mean over samples.
  std::int64_t batch_samples() const noexcept { return this->samples_; }
  /// Whether it was given a sampler, which divides the samples among the workers.
  bool has_own_sampler() const noexcept { return this->sampler_->is_own(); }
  /// For session.step(*loader): the batch in hand.
  const std::shared_ptr<const detail::step::BatchWeight>& step() const noexcept { return this->sampler_->batch(); }
};

/// A loader of this worker's share. The dataset must have the same size on every worker. An Error with
/// ScalingConfig::virtual_workers.
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Session& session, Dataset dataset,
                                                         const DataLoaderOptions& options = {}) {
  return detail::data::make_loader<DataLoader<Dataset>>(detail::data::worker_of(session), std::move(dataset), options);
}

/// With a distributed sampler of one's own (torch's DistributedRandomSampler, say), which is kept: it says who reads
/// what, and every worker counts the same in each step. The numbers of steps must agree. Where it stands nobody can
/// save: a report with a state is made between its passes, and one inside is an error.
template <class Dataset, class Sampler>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Session& session, Dataset dataset,
                                                         const DataLoaderOptions& options, Sampler sampler) {
  return detail::data::make_loader<DataLoader<Dataset>>(detail::data::worker_of(session), std::move(dataset), options,
                                                        std::move(sampler));
}

}  // namespace muster
