#include "data/preprocess/batch_work.hpp"

#include "data/preprocess/apply.hpp"

#include <ATen/core/grad_mode.h>

namespace muster::detail::data {

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
