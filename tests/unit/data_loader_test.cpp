#include "muster/data_loader.hpp"

#include "data/passes/pass_positions.hpp"

#include <ATen/ops/arange.h>
#include <gtest/gtest.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/transforms/stack.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

namespace muster::data_loader_test {
namespace {

using Samples = std::vector<std::int64_t>;
using torch::data::samplers::DistributedSequentialSampler;

/// Sample i is the number i.
auto numbers(std::int64_t n) {
  return torch::data::datasets::TensorDataset(at::arange(n))
      .map(torch::data::transforms::Stack<torch::data::TensorExample>());
}

detail::data::Worker worker(int rank, int world) {
  return {.rank = rank, .world = world, .seed = 3, .pass_positions = std::make_shared<detail::data::PassPositions>()};
}

/// Without a session.
template <class Dataset, class... Sampler>
auto prepare_data_loader(const detail::data::Worker& worker, Dataset dataset, const DataLoaderOptions& options = {},
                         Sampler... sampler) {
  return detail::data::make_loader<DataLoader<Dataset>>(worker, std::move(dataset), options, std::move(sampler)...);
}

TEST(DataLoader, ItsSamplerHasNoPositionOfItsOwn) {
  detail::data::TorchSampler sampler(nullptr);
  torch::serialize::OutputArchive archive;
  try {
    sampler.save(archive);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("saving or loading the sampler of a data loader: it has no position"), 0u);
  }
}

template <class Loader>
Samples pass(Loader& loader, std::int64_t* steps = nullptr) {
  Samples samples;
  for (const auto& batch : loader) {
    for (std::int64_t i = 0; i < loader.batch_samples(); ++i)
      samples.push_back(batch.data[i].template item<std::int64_t>());
    if (steps != nullptr) ++*steps;
  }
  return samples;
}

Samples indices(std::int64_t n) {
  Samples samples(static_cast<std::size_t>(n));
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

TEST(DataLoader, EverySampleOnceAndAsManySteps) {
  for (const std::int64_t size : {1, 5, 12})
    for (int world = 1; world <= 4; ++world)
      for (const std::size_t threads : {0, 2}) {
        Samples samples;
        std::set<std::int64_t> steps;
        for (int rank = 0; rank < world; ++rank) {
          const auto loader = prepare_data_loader(worker(rank, world), numbers(size),
                                                  {.batch_size = 2, .shuffle = true, .workers = threads});
          std::int64_t count = 0;
          const auto mine = pass(*loader, &count);
          samples.insert(samples.end(), mine.begin(), mine.end());
          steps.insert(count);
        }
        std::sort(samples.begin(), samples.end());
        EXPECT_EQ(samples, indices(size));
        EXPECT_EQ(steps.size(), 1u);
      }
}

TEST(DataLoader, OrdersFollowEpochAndPass) {
  const auto loader = prepare_data_loader(worker(0, 1), numbers(30), {.batch_size = 4, .shuffle = true});
  const auto first = pass(*loader), second = pass(*loader);
  loader->set_epoch(1);
  const auto third = pass(*loader);
  EXPECT_NE(first, second);
  EXPECT_NE(first, third);
  loader->set_epoch(0);
  EXPECT_EQ(pass(*loader), first);
  EXPECT_EQ(pass(*prepare_data_loader(worker(0, 1), numbers(7), {.batch_size = 4})), indices(7));
}

TEST(DataLoader, WeighsStepsByTheirSamples) {
  const auto self = worker(2, 3);
  const auto loader = prepare_data_loader(self, numbers(7), {.batch_size = 2, .workers = 2});
  std::vector<std::pair<std::int64_t, std::int64_t>> weights;
  Samples sizes;
  for (const auto& batch : *loader) {
    weights.emplace_back(self.pass_positions->steps->batch().local, self.pass_positions->steps->batch().global);
    sizes.push_back(batch.data.size(0));
    EXPECT_EQ(loader->batch_samples(), self.pass_positions->steps->batch().local);
  }
  EXPECT_EQ(weights, (std::vector<std::pair<std::int64_t, std::int64_t>>{{2, 6}, {0, 1}}));
  EXPECT_EQ(sizes, (Samples{2, 1}));
  EXPECT_EQ(self.pass_positions->steps->batch().global, 0);
}

struct Broken : torch::data::datasets::Dataset<Broken> {
  torch::data::Example<> get(std::size_t index) override {
    if (index == 5) throw std::runtime_error("sample 5 is broken");
    return {at::full({}, static_cast<std::int64_t>(index)), at::zeros({})};
  }
  torch::optional<std::size_t> size() const override { return 12; }
};

TEST(DataLoader, AfterAnExceptionItStandsStill) {
  for (const std::size_t threads : {0, 2}) {
    const auto self = worker(0, 1);
    const auto loader = prepare_data_loader(self, Broken().map(torch::data::transforms::Stack<>()),
                                            {.batch_size = 2, .workers = threads});
    auto batch = loader->begin();
    ++batch;
    for (int i = 0; i < 3; ++i) EXPECT_THROW(++batch, std::exception) << i;
    EXPECT_EQ(self.pass_positions->steps->global_step, 2);
  }
}

TEST(DataLoader, TheLongestTimeIsNoLimit) {
  const auto loader = prepare_data_loader(worker(0, 1), numbers(4),
                                          {.batch_size = 2, .workers = 1, .timeout = std::chrono::milliseconds::max()});
  EXPECT_EQ(pass(*loader), indices(4));
}

TEST(DataLoader, APassMayBeLeftEarly) {
  for (const std::size_t threads : {0, 2}) {
    const auto self = worker(0, 1);
    const auto loader = prepare_data_loader(self, numbers(100), {.batch_size = 2, .workers = threads});
    for (auto& batch : *loader) {
      EXPECT_EQ(batch.data[1].item<int>(), 1);
      break;
    }
    EXPECT_EQ(self.pass_positions->steps->batch().global, 0);
    EXPECT_EQ(pass(*loader), indices(100));
  }
}

TEST(DataLoader, AnIteratorThatIsReplacedEndsItsOwnPassOnly) {
  const auto self = worker(2, 3);
  const auto loader = prepare_data_loader(self, numbers(7), {.batch_size = 2});
  auto batch = loader->begin();
  batch = loader->begin();
  EXPECT_EQ(self.pass_positions->steps->batch().global, 6);
  ++batch;
  EXPECT_EQ(self.pass_positions->steps->weight(), 0.0);
  EXPECT_EQ(step_weight_of(*loader)->relative(), 0.0);
}

TEST(DataLoader, GoesOnWhereItWasSaved) {
  for (const std::size_t threads : {0, 2}) {
    const auto self = worker(0, 1);
    const auto loader = prepare_data_loader(self, numbers(20), {.batch_size = 2, .shuffle = true, .workers = threads});
    const auto undisturbed = pass(*prepare_data_loader(worker(0, 1), numbers(20), {.batch_size = 2, .shuffle = true}));
    Samples samples;
    Json positions;
    for (const auto& batch : *loader) {
      for (int i = 0; i < 2; ++i) samples.push_back(batch.data[i].item<std::int64_t>());
      if (samples.size() < 6) continue;
      positions = self.pass_positions->positions();
      break;
    }
    EXPECT_EQ(positions.at("train_loader").at("consumed"), 6) << "what was taken, not what was read ahead";
    const auto later = worker(0, 1);
    later.pass_positions->restore("train_loader", positions.at("train_loader"), false);
    const auto rest =
        pass(*prepare_data_loader(later, numbers(20), {.batch_size = 2, .shuffle = true, .workers = threads}));
    samples.insert(samples.end(), rest.begin(), rest.end());
    EXPECT_EQ(samples, undisturbed);
    EXPECT_EQ(later.pass_positions->epoch_progress(), detail::data::PassPositions::EpochProgress::over);
  }
}

TEST(DataLoader, TwoThatTrainTogetherHaveNamesOfTheirOwn) {
  const auto self = worker(0, 1);
  const auto a = prepare_data_loader(self, numbers(4), {.batch_size = 2});
  const auto b = prepare_data_loader(self, numbers(6), {.batch_size = 2});
  pass(*a);
  EXPECT_EQ(pass(*b), indices(6)) << "one after the other";
  {
    const auto first = a->begin();
    EXPECT_THROW(b->begin(), Error);
  }
  const auto aside = prepare_data_loader(self, numbers(6), {.batch_size = 2, .training = false});
  EXPECT_EQ(pass(*aside), indices(6));
  auto c = prepare_data_loader(self, numbers(6), {.name = "other", .batch_size = 2});
  EXPECT_EQ(pass(*c), indices(6));
  c.reset();
  EXPECT_EQ(pass(*prepare_data_loader(self, numbers(6), {.name = "other", .batch_size = 2})), indices(6))
      << "made anew";
  EXPECT_THROW(prepare_data_loader(self, numbers(6), {.batch_size = 2}, DistributedSequentialSampler(6, 1, 0)), Error)
      << "where the first one stands would be lost";
}

TEST(DataLoader, OneThatDoesNotTrainLeavesTheEpochOfAnotherOfItsName) {
  const auto self = worker(0, 1);
  const auto loader = prepare_data_loader(self, numbers(8), {.batch_size = 2, .shuffle = true});
  const auto aside = prepare_data_loader(self, numbers(4), {.batch_size = 2, .training = false});
  aside->set_epoch(2);  // nobody trains yet
  loader->set_epoch(3);
  std::int64_t steps = 0;
  for ([[maybe_unused]] const auto& batch : *loader) {
    aside->set_epoch(0);
    EXPECT_EQ(pass(*aside), indices(4));
    const auto position = self.pass_positions->positions().at("train_loader");
    EXPECT_EQ(position.at("epoch"), 3);
    EXPECT_EQ(position.at("consumed"), 2 * ++steps);
  }
  EXPECT_EQ(steps, 4);
}

TEST(DataLoader, DividesAGlobalBatchAndDropsTheLast) {
  std::int64_t steps = 0;
  pass(*prepare_data_loader(worker(1, 2), numbers(10), {.global_batch_size = 3}), &steps);
  EXPECT_EQ(steps, 4);
  steps = 0;
  pass(*prepare_data_loader(worker(1, 2), numbers(10), {.global_batch_size = 3, .drop_last = true}), &steps);
  EXPECT_EQ(steps, 3);
}

TEST(DataLoader, KeepsADistributedSampler) {
  const auto self = worker(1, 2);
  const auto loader = prepare_data_loader(self, numbers(10), {.batch_size = 2},
                                          DistributedSequentialSampler(10, /*num_replicas=*/2, /*rank=*/1));
  for (int repeat = 0; repeat < 2; ++repeat) EXPECT_EQ(pass(*loader), (Samples{5, 6, 7, 8, 9}));
  for (const auto& batch : *loader) EXPECT_EQ(self.pass_positions->steps->batch().global, 0) << batch.data;
  for (const DataLoaderOptions& options : {DataLoaderOptions{.global_batch_size = 4}, {.shuffle = true}})
    EXPECT_THROW(prepare_data_loader(self, numbers(10), options, DistributedSequentialSampler(10, 2, 1)), Error)
        << "the sampler decides that";
  {
    const auto other = prepare_data_loader(self, numbers(6), {.name = "other", .batch_size = 2},
                                           DistributedSequentialSampler(6, 2, 1));
    const auto first = loader->begin(), second = other->begin();
    EXPECT_EQ(self.pass_positions->steps->weight(), 1.0) << "of two such loaders too";
    EXPECT_NE(self.pass_positions->steps->find_unresumable_pass(), nullptr);
  }
  EXPECT_EQ(self.pass_positions->steps->find_unresumable_pass(), nullptr);
  const auto even = prepare_data_loader(self, numbers(10), {.batch_size = 2, .drop_last = true},
                                        DistributedSequentialSampler(10, 2, 1));
  EXPECT_EQ(pass(*even).size(), 4u);
}

TEST(DataLoader, MovesWhatABatchHolds) {
  auto self = worker(0, 1);
  self.device = at::kMeta;
  const auto loader = prepare_data_loader(self, torch::data::datasets::TensorDataset(at::arange(4)));
  for (const auto& batch : *loader)
    for (const auto& example : batch) EXPECT_TRUE(example.data.is_meta());
  torch::data::Example<> pair(at::arange(2), at::arange(2));
  detail::data::move_to(pair, at::kMeta);
  EXPECT_TRUE(pair.data.is_meta() && pair.target.is_meta());
}

struct Unsized : torch::data::datasets::Dataset<Unsized> {
  torch::data::Example<> get(std::size_t) override { return {}; }
  std::optional<std::size_t> size() const override { return {}; }
};

TEST(DataLoader, RefusesWhatHasNoIndex) {
  EXPECT_THROW(prepare_data_loader(worker(0, 1), Unsized()), Error);
  EXPECT_THROW(prepare_data_loader(worker(0, 1), numbers(3), {.batch_size = 0}), Error);
}

}  // namespace
}  // namespace muster::data_loader_test
