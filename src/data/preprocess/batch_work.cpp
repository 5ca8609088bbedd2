#include "data/preprocess/batch_work.hpp"

#include "data/preprocess/apply.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

namespace muster::detail::data {
namespace {

class TransformedSource final : public Source {
 public:
  TransformedSource(std::shared_ptr<Source> source, std::vector<BatchWork> work)
      : source_(std::move(source)), work_(std::make_shared<const std::vector<BatchWork>>(std::move(work))) {}

  const std::shared_ptr<Source>& stored() const noexcept { return source_; }
  const std::vector<BatchWork>& work() const noexcept { return *work_; }

  std::int64_t count() override { return source_->count(); }
  std::string shown() const override { return source_->shown(); }
  std::vector<std::string> files() const override { return source_->files(); }
  bool has_column_order() const noexcept override { return source_->has_column_order(); }
  DatasetFingerprint fingerprint() override { return source_->fingerprint(); }  // equal input gives equal output
  bool is_stream() const noexcept override { return source_->is_stream(); }
  int threads() const noexcept override {
    auto most = source_->threads();
    for (const auto& each : *work_) most = std::max(most, each.threads.value_or(1));
    return most;
  }

  BatchReader open(const StreamShard& shard, const StreamPlan& plan) override {
    return [work = work_, next = source_->open(shard, plan), seed = plan.random_seed, workers = shard.workers,
            number = std::int64_t{shard.worker}]() mutable {
      auto read = next();
      if (read) add_work(*read, *work, seed(number));
      number += workers;
      return read;
    };
  }

  bool draws() const noexcept override { return source_->draws(); }
  std::optional<ReadBatch> draw(std::int64_t count, std::uint64_t seed, const std::function<void()>& between) override {
    auto drawn = source_->draw(count, seed, between);
    if (drawn) add_work(*drawn, *work_, seed);
    return drawn;
  }
  Json ledger(const Communicator& workers) override { return source_->ledger(workers); }
  std::shared_ptr<Source> to_fit() override { return std::make_shared<TransformedSource>(source_->to_fit(), *work_); }

  const Schema& schema() override {
    // Neither a preprocessor nor a function declares its output columns. So the work is done on one sample to find
    // them.
    std::call_once(once_, [this] {
      constexpr std::array<std::int64_t, 1> first{0};
      schema_ = schema_of(read(first));
      keep_variable_sizes();
    });
    return schema_;
  }

  Batch read(std::span<const std::int64_t> samples) override {
    return finished(read_ahead(samples, samples.empty() ? 0 : static_cast<std::uint64_t>(samples.front())));
  }

  ReadBatch read_ahead(std::span<const std::int64_t> samples, std::uint64_t seed) override {
    auto read = source_->read_ahead(samples, seed);
    add_work(read, *work_, seed);
    return read;
  }

  Blocks blocks() override { return source_->blocks(); }
  NodeChunks* node_chunks() override { return source_->node_chunks(); }
  void end_threads() override { source_->end_threads(); }
  std::shared_ptr<const Lengths> lengths() override { return source_->lengths(); }
  void expect(std::span<const std::int64_t> samples, Ahead how) override { source_->expect(samples, how); }

 private:
  /// Marks by −1 the sizes that differ from batch to batch: those that differ in the source, and that the work has left
  /// as they are in the first sample.
  void keep_variable_sizes() {
    constexpr std::array<std::int64_t, 1> first{0};
    const auto stored = source_->schema(), of_first = schema_of(source_->read(first));
    for (std::size_t c = 0; c < stored.size(); ++c) {
      const auto found = std::ranges::find(schema_, stored[c].name, &Column::name);
      if (found == schema_.end()) continue;
      const auto dimensions = std::min(found->shape.size(), stored[c].shape.size());
      for (std::size_t d = 0; d < dimensions; ++d)
        if (stored[c].shape[d] < 0 && found->shape[d] == of_first[c].shape[d]) found->shape[d] = -1;
    }
  }

  std::shared_ptr<Source> source_;
  std::shared_ptr<const std::vector<BatchWork>> work_;
  std::once_flag once_;
  Schema schema_;
};

}  // namespace

std::vector<BatchWork> work_of(std::shared_ptr<const Preprocessor> preprocessor, int threads) {
  std::vector<std::shared_ptr<const Preprocessor>> steps;
  add_steps(std::move(preprocessor), steps);
  std::vector<BatchWork> work;
  for (auto& step : steps) {
    const auto run = [step = std::move(step)](Batch& batch, at::Generator& generator, bool ahead) {
      if (ahead) return try_apply_ahead(*step, batch, generator);
      apply(*step, batch, generator);
      return true;
    };
    work.push_back({.run = run, .threads = threads});
  }
  return work;
}

BatchWork work_of(std::variant<BatchFunction::WithGenerator, BatchFunction::Plain> function, int threads) {
  // Shared, since each batch has a copy of its work.
  const auto shared = std::make_shared<const decltype(function)>(std::move(function));
  const auto run = [shared](Batch& batch, at::Generator& generator, bool) {
    std::visit([&](const auto& given) { apply(given, batch, generator); }, *shared);
    return true;
  };
  return {.run = run, .threads = threads};
}

std::shared_ptr<Source> transformed_source(std::shared_ptr<Source> source, std::vector<BatchWork> work) {
  if (const auto* const before = dynamic_cast<const TransformedSource*>(source.get())) {
    work.insert(work.begin(), before->work().begin(), before->work().end());
    source = std::shared_ptr(before->stored());
  }
  return std::make_shared<TransformedSource>(std::move(source), std::move(work));
}

void add_work(ReadBatch& read, std::span<const BatchWork> work, std::uint64_t seed) {
  if (!read.generator.defined()) read.generator = make_generator(seed);
  read.work.insert(read.work.end(), work.begin(), work.end());
}

bool run_first(ReadBatch& read, bool ahead) {
  const at::NoGradGuard no_grad;
  return read.work.front().run(read.batch, read.generator, ahead);
}

Batch finished(ReadBatch read) {
  for (; !read.work.empty(); read.work.pop_front()) run_first(read, /*ahead=*/false);
  return std::move(read.batch);
}

}  // namespace muster::detail::data
