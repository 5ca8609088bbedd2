#include "soak/pass_speed.hpp"

#include "data/passes/pass_positions.hpp"
#include "data/passes/shard.hpp"
#include "data/sources/source.hpp"
#include "support/hdf5_fixture.hpp"
#include "watch/time_use.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

using namespace detail::data;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t rows = 1'000'000;
constexpr std::int64_t planned = 1'000'000'000;
bool too_slow = false;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void print(const std::string& what, double value, double most, const char* unit) {
  const bool slow = value > most;
  too_slow = too_slow || slow;
  std::printf("%-62s %7.2f %-2s (at most %.0f)%s\n", what.c_str(), value, unit, most, slow ? " TOO SLOW" : "");
  std::fflush(stdout);
}

/// The smallest of some tries: other processes only add to it.
double best_of(int tries, const std::function<double()>& measure) {
  auto best = measure();
  for (int i = 1; i < tries; ++i) best = std::min(best, measure());
  return best;
}

/// A worker's view of the dataset, alone.
struct Alone {
  explicit Alone(Dataset dataset)
      : state(std::make_shared<ShardState>(PassPositionOptions{.name = "train"}, std::move(dataset))) {
    positions->add(state);
  }
  DatasetShard shard() const { return DatasetShard(state); }

  std::shared_ptr<PassPositions> positions = std::make_shared<PassPositions>();
  std::shared_ptr<ShardState> state;
};

/// x [rows, 16] float and y [rows] int64.
std::string write_rows(const test::Folder& folder, const char* name, const test::Layout& layout) {
  const auto path = folder.file(name);
  test::H5File file(path);
  file.dataset("x", {rows, 16}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, test::counting<float>(16 * rows).data(), layout);
  file.dataset("y", {rows}, H5T_STD_I64LE, H5T_NATIVE_INT64, test::counting<std::int64_t>(rows).data(), layout);
  return path;
}

/// Samples of 0 to 15 tokens.
std::string write_ragged(const test::Folder& folder) {
  std::vector<std::int64_t> offsets{0};
  for (std::int64_t i = 0; i < rows; ++i) offsets.push_back(offsets.back() + (i * 7) % 16);
  const auto path = folder.file("ragged.h5");
  test::H5File file(path);
  const auto sum = static_cast<hsize_t>(offsets.back());
  file.dataset("tokens", {sum}, H5T_STD_I32LE, H5T_NATIVE_INT32, test::counting<std::int32_t>(sum).data());
  file.dataset("offsets", {rows + 1}, H5T_STD_I64LE, H5T_NATIVE_INT64, offsets.data());
  return path;
}

void measure_first_batch(const std::string& what, const std::function<Dataset()>& open, const BatchOptions& options) {
  const auto once = [&] {
    const auto begin = Clock::now();
    const Alone alone(open());
    source_of(alone.state->dataset)->fingerprint();  // what ranks compare before training
    auto range = alone.shard().iter_batches(options);
    static_cast<void>(range.begin());
    return 1e3 * seconds_since(begin);
  };
  print("first batch of 10^6 samples, " + what, best_of(5, once), 50, "ms");
}

void measure_first_batches() {
  const test::Folder folder;
  const auto contiguous = write_rows(folder, "contiguous.h5", {});
  const auto chunked = write_rows(folder, "chunked.h5", {.chunk = 4096, .deflate = 1});
  const auto ragged = write_ragged(folder);
  const auto of = [](const std::string& path) { return [path] { return Dataset(path); }; };
  const auto texts = [&] { return Dataset::ragged(ragged, {.values = {"tokens"}}); };
  measure_first_batch("in order", of(contiguous), {});
  measure_first_batch("shuffled", of(contiguous), {.shuffle = true});
  measure_first_batch("by weights", of(contiguous), {.weights = at::ones({rows})});
  measure_first_batch("gzip, in order", of(chunked), {});
  measure_first_batch("gzip, in lanes", [&] { return Dataset::from_hdf5({chunked}, {.cache_bytes = 40 << 20}); },
                      {.shuffle = true});
  measure_first_batch("of different length, shuffled", texts, {.shuffle = true});
  measure_first_batch("of different length, in buckets", texts, {.shuffle = true, .bucket_samples = 256});
}

void measure_plan(const std::string& what, const OrderOptions& options) {
  constexpr std::int64_t batch = 256, steps = 4000;
  const auto memory = [] { return static_cast<double>(::mallinfo2().uordblks) / 1024; };
  double kept = 0;
  std::int64_t sum = 0;
  const auto once = [&] {
    const auto before = memory();
    const auto begin = Clock::now();
    const detail::data::Order order(planned, options);
    for (std::int64_t step = 0; step < steps; ++step) {
      // From all parts of the pass, by one of two ranks.
      const auto position = step * (planned / steps);
      for (const auto sample : samples_of(step_at(position, planned, 2 * batch, 2, 1), order)) sum += sample;
    }
    const auto seconds = seconds_since(begin);
    kept = std::max(kept, memory() - before);
    return 1e9 * seconds / static_cast<double>(steps * batch);
  };
  print("plan of 10^9 samples, " + what + ", a sample", best_of(3, once), 1000, "ns");
  print("plan of 10^9 samples, " + what + ", memory", kept, 1024, "KB");
  if (sum == 0) std::abort();
}

void measure_plans() {
  measure_plan("shuffled", {.shuffle = true});
  measure_plan("local shuffle", {.window = 1 << 20});
  measure_plan("in lanes", {.shuffle = true, .blocks = {.rows = 4096, .files = {planned / 2, planned / 2}}});
}

void compute(double seconds) {
  for (const auto begin = Clock::now(); seconds_since(begin) < seconds;) {
  }
}

/// A step takes twice as long as reading its batch.
void measure_wait() {
  const test::Folder folder;
  const Dataset data(write_rows(folder, "rows.h5", {}));
  const BatchOptions options{.batch_size = 4096, .shuffle = true};
  const auto seconds_to_read = [&] {
    auto at_once = options;
    at_once.prefetch_batches = 0;
    const Alone alone(data);
    const auto begin = Clock::now();
    std::int64_t batches = 0;
    for ([[maybe_unused]] auto& batch : alone.shard().iter_batches(at_once)) ++batches;
    return seconds_since(begin) / static_cast<double>(batches);
  };
  const auto of_batch = best_of(3, seconds_to_read);
  const auto share = [&] {
    const Alone alone(data);
    auto range = alone.shard().iter_batches(options);
    auto batch = range.begin();
    const auto begin = Clock::now();
    const auto before = detail::watch::time_use();
    for (int step = 0; step < 50; ++step) {
      compute(2 * of_batch);
      ++batch;
    }
    return 100 * std::chrono::duration<double>((detail::watch::time_use() - before).data).count() /
           seconds_since(begin);
  };
  print("wait for data, of a step twice as long as reading", best_of(20, share), 1, "%");
}

}  // namespace

bool measure_passes() {
  measure_first_batches();
  measure_plans();
  measure_wait();
  return !too_slow;
}

}  // namespace muster::soak
