// Reads windows of arrays in a random order, one pass.
//   window_speed SIZE,… BATCH SEED FILE:/NAME...
// Prints the number of windows, the seconds of the pass, opening included, and the sum of all values.
#include "muster/muster.hpp"
#include "support/folder.hpp"
#include "support/job.hpp"
#include "support/numbers.hpp"

#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "window_speed SIZE,… BATCH SEED FILE:/NAME...\n");
    return 64;
  }
  const auto data =
      muster::Dataset::windows({arguments + 4, arguments + count}, {.size = muster::test::numbers(arguments[1])});
  const muster::test::Folder folder;
  const muster::test::Job job{
      .storage = folder.path(), .flags = {"--seed", arguments[3]}, .options = {.datasets = {{"train", data}}}};
  return muster::test::run(job,
                           [&](muster::Session& session, const muster::Config&) {
                             const auto begin = std::chrono::steady_clock::now();
                             std::int64_t windows = 0;
                             double sum = 0;
                             for (auto& batch : session.get_dataset_shard().iter_torch_batches(
                                      {.batch_size = std::stoll(arguments[2]), .training = false, .shuffle = true})) {
                               windows += batch.size();
                               for (const auto& [name, values] : batch)
                                 if (values.is_floating_point()) sum += values.sum(at::kDouble).item<double>();
                             }
                             const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
                             std::printf("%lld %.6f %.6e\n", static_cast<long long>(windows), seconds.count(), sum);
                           })
      .first;
}
