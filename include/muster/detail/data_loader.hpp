// Implementation of muster/data_loader.hpp; nothing in it is for users.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/detail/worker.hpp>
#include <muster/error.hpp>

#include <torch/data/dataloader/stateless.h>
#include <torch/data/samplers/base.h>
#include <torch/data/samplers/distributed.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

struct DataLoaderOptions;

namespace detail::step {
struct BatchWeight;
}

namespace detail::data {

/// Chooses the samples that a loader reads, and tracks which batch is the current one.
class MUSTER_API LoaderSampler {
 public:
  virtual ~LoaderSampler() = default;
  /// True if the user's own sampler chooses the samples.
  virtual bool is_own() const noexcept { return false; }
  virtual void set_epoch(std::int64_t epoch) = 0;
  /// Begins a pass and returns its number.
  virtual std::int64_t begin_pass() = 0;
  /// The indices of the samples of the next batch to be read; empty at the end of the pass.
  virtual std::optional<std::vector<std::size_t>> next(std::size_t batch_size) = 0;
  /// Makes the next batch that was read the current one. Returns how many of its samples count; padding does not.
  virtual std::int64_t begin_batch() = 0;
  /// Call before the next batch is requested. If the run was asked to stop, it may save and throw here.
  virtual void stop_if_asked() = 0;
  /// The weight of the current batch in its step.
  virtual const std::shared_ptr<const step::BatchWeight>& batch() const noexcept = 0;
  /// Ends the pass with this number if it is still open.
  virtual void end_pass(std::int64_t pass) noexcept = 0;
};

/// Calls `read`, and counts the time that it takes as time in which this worker waits for data.
MUSTER_API void run_as_wait_for_data(const std::function<void()>& read);

/// The user's own sampler, which divides the samples among the workers itself.
struct OwnSampler {
  std::function<void(std::int64_t epoch)> set_epoch;
  std::function<void()> reset;
  std::function<std::optional<std::vector<std::size_t>>(std::size_t batch_size)> next;
};

/// Returns a sampler that follows one order of all samples and divides each step among the workers. A worker without
/// samples in a step gets one sample of weight 0.
MUSTER_API std::shared_ptr<LoaderSampler> split_sampler(const Worker& worker, std::int64_t size,
                                                        const DataLoaderOptions& options);
/// Returns a sampler that takes the samples that the user's own sampler chooses.
MUSTER_API std::shared_ptr<LoaderSampler> follow_sampler(const Worker& worker, std::int64_t size,
                                                         const DataLoaderOptions& options, OwnSampler sampler);
/// Returns the options for torch's loader. It applies drop_last only with `own_sampler`; otherwise the sampler does.
MUSTER_API torch::data::DataLoaderOptions torch_options(const DataLoaderOptions& options, bool own_sampler);

/// Adapts a LoaderSampler to torch's loader.
class TorchSampler final : public torch::data::samplers::Sampler<> {
 public:
  explicit TorchSampler(std::shared_ptr<LoaderSampler> sampler) : sampler_(std::move(sampler)) {}
  void reset(std::optional<std::size_t> = std::nullopt) override { sampler_->begin_pass(); }
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override { return sampler_->next(batch_size); }
  void save(torch::serialize::OutputArchive&) const override { refuse(); }
  void load(torch::serialize::InputArchive&) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    throw Error(ExitCode::usage, "saving or loading the sampler of a data loader", "it has no position",
                "session.report(metrics, state) saves the loader's position");
  }
  std::shared_ptr<LoaderSampler> sampler_;
};

/// Moves all tensors to the device, in examples, containers of examples, and so on; leaves everything else.
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

/// The base class of DataLoader: torch's loader with one pass at a time, which may be left early.
template <class Dataset>
class Loader : public torch::data::StatelessDataLoader<Dataset, TorchSampler> {
  using Base = torch::data::StatelessDataLoader<Dataset, TorchSampler>;

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
    friend class Loader;
    bool at_end() const noexcept { return !loader_->batch_; }
    Loader* loader_ = nullptr;
    std::shared_ptr<LoaderSampler> pass_;  // its deleter ends the pass when the last copy is gone
  };

  Loader(Dataset dataset, std::shared_ptr<LoaderSampler> sampler, torch::data::DataLoaderOptions options,
         c10::Device device)
      : Base(std::move(dataset), TorchSampler(sampler), options), sampler_(std::move(sampler)), device_(device) {}

  iterator begin() {
    iterator first;
    first.loader_ = this;
    batch_.reset();
    failure_ = nullptr;
    // Base::begin() is not called, since it throws if the previous pass was left early. reset() discards what was read
    // ahead.
    number_ = sampler_->begin_pass();
    first.pass_ = {sampler_.get(),
                   [sampler = sampler_, number = number_](LoaderSampler*) { sampler->end_pass(number); }};
    Base::super::reset();
    advance();
    return first;
  }
  std::default_sentinel_t end() const noexcept { return {}; }

 protected:
  std::shared_ptr<LoaderSampler> sampler_;
  std::int64_t samples_ = 0;  ///< how many samples of the current batch count; padding does not

 private:
  /// After an exception the pass does not advance, and each ++ throws the exception again.
  void advance() {
    if (failure_) std::rethrow_exception(failure_);
    if (batch_) sampler_->stop_if_asked();
    batch_.reset();
    samples_ = 0;
    try {
      run_as_wait_for_data([&] { batch_ = this->next(); });
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
    if (!batch_) return sampler_->end_pass(number_);
    samples_ = sampler_->begin_batch();
    move_to(*batch_, device_);
  }

  c10::Device device_;
  std::optional<BatchType> batch_;
  std::int64_t number_ = 0;  ///< number of the current pass
  std::exception_ptr failure_ = {};
};

/// The dataset's number of samples. Rejects datasets from which no sampler can choose, most of them at compile time.
template <class Dataset>
std::int64_t size_of(const Dataset& dataset) {
  static_assert(!Dataset::is_stateful,
                "prepare_data_loader cannot divide a stateful dataset (ChunkDataset, StatefulDataset): it chooses its "
                "samples by itself. Use torch::data::make_data_loader, and let it choose by worker.");
  static_assert(!std::same_as<typename Dataset::BatchRequestType, std::size_t>,
                "prepare_data_loader cannot divide a StreamDataset: its samples have no index. Use "
                "torch::data::make_data_loader, and let each worker read a stream of its own.");
  const auto size = dataset.size();
  if (!size || *size == 0)
    throw Error(ExitCode::data, "preparing a data loader",
                size ? "the dataset has no samples" : "the dataset does not know its size",
                "Give a dataset whose samples have an index");
  return static_cast<std::int64_t>(*size);
}

/// Makes a DataLoader of the dataset.
template <class DataLoader, class Dataset>
std::unique_ptr<DataLoader> make_loader(const Worker& worker, Dataset dataset, const DataLoaderOptions& options) {
  auto sampler = split_sampler(worker, size_of(dataset), options);
  return std::make_unique<DataLoader>(std::move(dataset), std::move(sampler), torch_options(options, false),
                                      worker.device);
}

template <class DataLoader, class Dataset, class Sampler>
std::unique_ptr<DataLoader> make_loader(const Worker& worker, Dataset dataset, const DataLoaderOptions& options,
                                        Sampler sampler) {
  static_assert(std::derived_from<Sampler, torch::data::samplers::DistributedSampler<>>,
                "This sampler does not divide among workers, each would read everything. Give a distributed one, or "
                "none and the option shuffle.");
  const auto own = std::make_shared<Sampler>(std::move(sampler));
  auto follow =
      follow_sampler(worker, size_of(dataset), options,
                     {.set_epoch = [own](std::int64_t epoch) { own->set_epoch(static_cast<std::size_t>(epoch)); },
                      .reset = [own] { own->reset(std::nullopt); },
                      .next = [own](std::size_t batch_size) { return own->next(batch_size); }});
  return std::make_unique<DataLoader>(std::move(dataset), std::move(follow), torch_options(options, true),
                                      worker.device);
}

}  // namespace detail::data
}  // namespace muster
