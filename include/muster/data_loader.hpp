// torch's own data loader over torch's own datasets, divided among the workers.
//
//   auto loader = muster::prepare_data_loader(session, dataset.map(torch::data::transforms::Stack<>()),
//                                             {.batch_size = 64, .shuffle = true});
//   for (auto epoch : session.epochs(10)) {
//     loader->set_epoch(epoch);
//     for (auto& batch : *loader) …                      // on the session's device
//   }
//
// Samples are divided as in a DatasetShard: every sample once per pass, and the same number of steps on every worker,
// with the last step divided evenly. Passes count like a shard's passes (see BatchOptions::training). A stopped run
// continues in the middle of a pass, which it finds by the loader's name; batches that were only read ahead do not
// count as taken.
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
  /// The name under which the loader's position is saved. Two loaders whose training passes are open at the same time
  /// need different names, and so do a loader and a dataset.
  std::string name = "train_loader";
  /// Samples per worker and step.
  std::size_t batch_size = 256;
  /// Samples per step over all workers, in place of batch_size. An error with your own sampler.
  std::optional<std::size_t> global_batch_size = {};
  /// Takes the samples in a random order of the whole dataset, a new one in each pass of each epoch. An error with your
  /// own sampler.
  bool shuffle = false;
  /// Leaves out the last step of a pass if it is not full; with your own sampler, each worker's last batch if it is not
  /// full.
  bool drop_last = false;
  /// See BatchOptions::training.
  bool training = true;
  /// Threads that read, each with its own copy of the dataset; 0: the iterating thread reads.
  std::size_t workers = 0;
  /// How long a step may wait for a batch of these threads; empty: without limit.
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Made by prepare_data_loader(), for the thread that runs the training function. begin() begins a pass; only one may
/// be open, but a pass that is left early may be followed by another.
template <class Dataset>
class DataLoader : public detail::data::Loader<Dataset> {
 public:
  using detail::data::Loader<Dataset>::Loader;

  /// Sets the epoch that seeds the order. The passes of one epoch have different orders too.
  void set_epoch(std::int64_t epoch) { this->sampler_->set_epoch(epoch); }
  /// How many samples of the current batch count. It is 0 if the last step has none left for this worker: the batch
  /// then has a copy of another worker's sample, whose gradient does not count. Leave this sample out of your own means
  /// over samples, too.
  std::int64_t batch_samples() const noexcept { return this->samples_; }
  /// True if the loader was given your own sampler, which divides the samples among the workers.
  bool has_own_sampler() const noexcept { return this->sampler_->is_own(); }
  /// The weight of the current batch in its step.
  const std::shared_ptr<const detail::step::BatchWeight>& step() const noexcept { return this->sampler_->batch(); }

 private:
  /// For session.step(*loader).
  friend const std::shared_ptr<const detail::step::BatchWeight>& step_weight_of(const DataLoader& loader) noexcept {
    return loader.step();
  }
};

/// Returns a loader of this worker's share. The dataset must have the same size on every worker. An Error with
/// ScalingConfig::virtual_workers.
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Session& session, Dataset dataset,
                                                         const DataLoaderOptions& options = {}) {
  return detail::data::make_loader<DataLoader<Dataset>>(detail::data::worker_of(session), std::move(dataset), options);
}

/// Returns a loader with your own distributed sampler (such as torch's DistributedRandomSampler). The sampler decides
/// who reads what, and in each step every worker has the same weight. All workers must take the same number of steps.
/// The sampler's position cannot be saved: report a state between its passes; inside a pass it is an error.
template <class Dataset, class Sampler>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Session& session, Dataset dataset,
                                                         const DataLoaderOptions& options, Sampler sampler) {
  return detail::data::make_loader<DataLoader<Dataset>>(detail::data::worker_of(session), std::move(dataset), options,
                                                        std::move(sampler));
}

}  // namespace muster
