// torch's own data loader over torch's own datasets, dealt out to the workers.
//
//   auto loader = muster::prepare_data_loader(session.worker(), dataset.map(torch::data::transforms::Stack<>()),
//                                             {.batch_size = 64, .shuffle = true});
//   for (auto epoch : session.epochs(10)) {
//     loader->set_epoch(epoch);
//     for (auto& batch : *loader) …                      // on the session's device
//   }
//
// Samples are dealt as DatasetShard deals them: every sample once per epoch, the same number of steps on every worker,
// the last one divided evenly. Passes count as a shard's do (see BatchOptions::training), and a stopped run goes on in
// the middle of one, by the loader's name: what counts is what was taken, not what was read ahead.
#pragma once

#include <muster/error.hpp>
#include <muster/worker.hpp>

#include <torch/data/dataloader/stateless.h>
#include <torch/data/samplers/base.h>
#include <torch/data/samplers/distributed.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

namespace detail::step {
struct BatchWeight;
}

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

namespace detail::data {

/// Decides which samples a loader reads, and follows which batch is in hand.
class Dealer {
 public:
  virtual ~Dealer() = default;
  virtual void set_epoch(std::int64_t epoch) = 0;
  /// Gives the number of the pass.
  virtual std::int64_t begin_pass() = 0;
  /// The samples of the next batch to be read; none at the end.
  virtual std::optional<std::vector<std::size_t>> deal(std::size_t batch_size) = 0;
  /// The next of the batches that were dealt is in hand; gives how many of its samples count.
  virtual std::int64_t take() = 0;
  /// The batch in hand, if there is one, is done with.
  virtual void leave() = 0;
  /// What the batch in hand is of its step.
  virtual const std::shared_ptr<const step::BatchWeight>& step() const noexcept = 0;
  /// Ends that pass, if it is not over.
  virtual void end_pass(std::int64_t pass) noexcept = 0;
};

/// A sampler that deals among the workers by itself.
struct OwnSampler {
  std::function<void(std::int64_t epoch)> set_epoch;
  std::function<void()> reset;
  std::function<std::optional<std::vector<std::size_t>>(std::size_t batch_size)> next;
};

/// Deals the steps of one order to the workers; an empty one gets a sample that does not count.
std::shared_ptr<Dealer> step_dealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options);
/// Asks the sampler.
std::shared_ptr<Dealer> sampler_dealer(const Worker& worker, std::int64_t size, const DataLoaderOptions& options,
                                       OwnSampler sampler);

/// A dealer as torch's loader wants it.
class LoaderSampler final : public torch::data::samplers::Sampler<> {
 public:
  explicit LoaderSampler(std::shared_ptr<Dealer> dealer) : dealer_(std::move(dealer)) {}
  void reset(std::optional<std::size_t> = std::nullopt) override { dealer_->begin_pass(); }
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override { return dealer_->deal(batch_size); }
  void save(torch::serialize::OutputArchive&) const override { refuse(); }
  void load(torch::serialize::InputArchive&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    throw Error(ExitCode::usage, "saving or loading the sampler of a data loader", "it has no position",
                "session.report(metrics, state) saves the loader's position");
  }
  std::shared_ptr<Dealer> dealer_;
};

/// Moves the tensors of an example, of a container of examples, and so on; leaves everything else.
template <class T>
void move_to(T& value, const c10::Device& device) {
  if constexpr (std::same_as<T, at::Tensor>) {
    if (value.defined()) value = value.to(device);
  } else if constexpr (std::ranges::range<T>) {
    if constexpr (std::is_class_v<std::ranges::range_value_t<T>>)
      for (auto& part : value) move_to(part, device);
  } else if constexpr (requires { value.data; }) {
    move_to(value.data, device);
    if constexpr (requires { value.target; }) move_to(value.target, device);
  } else if constexpr (requires { value.first, value.second; }) {
    move_to(value.first, device);
    move_to(value.second, device);
  }
}

}  // namespace detail::data

/// Made by prepare_data_loader. One pass at a time; one that is left early may be followed by another.
template <class Dataset>
class DataLoader : public torch::data::StatelessDataLoader<Dataset, detail::data::LoaderSampler> {
  using Base = torch::data::StatelessDataLoader<Dataset, detail::data::LoaderSampler>;

 public:
  using BatchType = typename Dataset::BatchType;

  class iterator {
   public:
    using value_type = BatchType;
    using difference_type = std::ptrdiff_t;
    using iterator_category = std::input_iterator_tag;
    BatchType& operator*() const { return *loader_->batch_; }
    BatchType* operator->() const { return &*loader_->batch_; }
    iterator& operator++() {
      loader_->advance();
      return *this;
    }
    void operator++(int) { ++*this; }
    friend bool operator==(const iterator& a, std::default_sentinel_t) noexcept { return a.at_end(); }

   private:
    friend class DataLoader;
    bool at_end() const noexcept { return !loader_->batch_; }
    DataLoader* loader_ = nullptr;
    std::shared_ptr<detail::data::Dealer> pass_;  // ends it with the last copy
  };

  DataLoader(Dataset dataset, std::shared_ptr<detail::data::Dealer> dealer, torch::data::DataLoaderOptions options,
             c10::Device device)
      : Base(std::move(dataset), detail::data::LoaderSampler(dealer), options),
        dealer_(std::move(dealer)),
        device_(device) {}

  iterator begin() {
    iterator first;
    first.loader_ = this;
    batch_.reset();
    // Not torch's begin(), which refuses if the pass before was left early: this drops what was read ahead for it.
    number_ = dealer_->begin_pass();
    first.pass_ = {dealer_.get(),
                   [dealer = dealer_, number = number_](detail::data::Dealer*) { dealer->end_pass(number); }};
    Base::super::reset();
    advance();
    return first;
  }
  std::default_sentinel_t end() const noexcept { return {}; }

  /// Fixes the epoch that seeds the order. The passes of one epoch have different orders too.
  void set_epoch(std::int64_t epoch) { dealer_->set_epoch(epoch); }
  /// Samples of the batch in hand that count: 0 where a worker is left empty in the last step and got a sample of
  /// somebody else's, which its gradient leaves out and so should a mean over samples.
  std::int64_t batch_samples() const noexcept { return samples_; }
  /// For session.step(*loader): the batch in hand.
  const std::shared_ptr<const detail::step::BatchWeight>& step() const noexcept { return dealer_->step(); }

 private:
  void advance() {
    if (batch_) dealer_->leave();
    batch_.reset();
    samples_ = 0;
    batch_ = this->next();
    if (!batch_) return dealer_->end_pass(number_);
    samples_ = dealer_->take();
    detail::data::move_to(*batch_, device_);
  }

  std::shared_ptr<detail::data::Dealer> dealer_;
  c10::Device device_;
  std::optional<BatchType> batch_;
  std::int64_t samples_ = 0;
  std::int64_t number_ = 0;  ///< of the pass
};

namespace detail::data {

template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> make_data_loader(const Worker& worker, Dataset dataset,
                                                      std::shared_ptr<Dealer> dealer, const DataLoaderOptions& options,
                                                      bool torch_drops_last) {
  torch::data::DataLoaderOptions given(options.batch_size);
  given.workers(options.workers).timeout(options.timeout).drop_last(torch_drops_last);
  return std::make_unique<DataLoader<Dataset>>(std::move(dataset), std::move(dealer), given, worker.device);
}

/// What no sampler can deal out is refused, most of it by the compiler.
template <class Dataset>
std::int64_t size_of(const Dataset& dataset) {
  static_assert(
      !Dataset::is_stateful,
      "prepare_data_loader cannot deal out a stateful dataset (ChunkDataset, StatefulDataset): it chooses its "
      "samples by itself. Use torch::data::make_data_loader, and let it choose by worker.");
  static_assert(!std::same_as<typename Dataset::BatchRequestType, std::size_t>,
                "prepare_data_loader cannot deal out a StreamDataset: its samples have no index. Use "
                "torch::data::make_data_loader, and let each worker read a stream of its own.");
  const auto size = dataset.size();
  if (!size || *size == 0)
    throw Error(ExitCode::data, "preparing a data loader",
                size ? "the dataset has no samples" : "the dataset does not know its size",
                "Give a dataset whose samples have an index");
  return static_cast<std::int64_t>(*size);
}

}  // namespace detail::data

/// A loader of this worker's share. The dataset must have the same size on every worker.
template <class Dataset>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Worker& worker, Dataset dataset,
                                                         const DataLoaderOptions& options = {}) {
  auto dealer = detail::data::step_dealer(worker, detail::data::size_of(dataset), options);
  return detail::data::make_data_loader(worker, std::move(dataset), std::move(dealer), options, false);
}

/// With a distributed sampler of one's own (torch's DistributedRandomSampler, say), which is kept: it says who reads
/// what, and every worker counts the same in each step. The numbers of steps must agree. Where it stands nobody can
/// save: a report with a state is made between its passes, and one inside is an error.
template <class Dataset, class Sampler>
std::unique_ptr<DataLoader<Dataset>> prepare_data_loader(const Worker& worker, Dataset dataset,
                                                         const DataLoaderOptions& options, Sampler sampler) {
  static_assert(std::derived_from<Sampler, torch::data::samplers::DistributedSampler<>>,
                "This sampler does not deal among workers, each would read everything. Give a distributed one, or none "
                "and the option shuffle.");
  const auto own = std::make_shared<Sampler>(std::move(sampler));
  auto dealer = detail::data::sampler_dealer(
      worker, detail::data::size_of(dataset), options,
      {.set_epoch = [own](std::int64_t epoch) { own->set_epoch(static_cast<std::size_t>(epoch)); },
       .reset = [own] { own->reset(std::nullopt); },
       .next = [own](std::size_t batch_size) { return own->next(batch_size); }});
  return detail::data::make_data_loader(worker, std::move(dataset), std::move(dealer), options, options.drop_last);
}

}  // namespace muster
