// muster bench data: passes over a dataset file, as in training on one rank; compared with plain reading.
#include "bench.hpp"
#include "plain_reader.hpp"
#include "rounds.hpp"
#include "training.hpp"

#include <muster/convert.hpp>
#include <muster/dataset.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

namespace muster::bench {
namespace {

constexpr const char* shuffled_case = "shuffled";
constexpr const char* sequential_case = "sequential";

/// A pass reads at most about this many decoded bytes. With the default of DatasetOptions::cache_bytes, that much is
/// kept in memory.
constexpr std::int64_t most_bytes = std::int64_t{1} << 30;

constexpr double wanted_round_ms =
    100;  ///< short passes are repeated, so that a candidate takes about this long in a round

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Keeps this thread busy, as a step does.
void compute(double ms) {
  const auto begin = Clock::now();
  while (ms_since(begin) < ms) continue;
}

struct Pass {
  double ms = 0, first_batch_ms = 0, waiting_ms = 0;
};

/// Makes a pass over the dataset after opening it anew. `compute_ms`: how long each step computes.
Pass read_pass(Launch& launch, const DatasetPlan& plan, bool shuffle, double compute_ms) {
  Pass pass;
  const auto body = [&](Session& session) {
    auto batches = session.get_dataset_shard().iter_torch_batches(
        {.batch_size = plan.batch, .training = false, .shuffle = shuffle});
    const auto begin = Clock::now();
    std::int64_t samples = 0;
    auto batch = batches.begin();
    pass.first_batch_ms = pass.waiting_ms = ms_since(begin);
    while (!(batch == batches.end())) {
      samples += batch->size();
      compute(compute_ms);
      if (samples >= plan.samples) break;
      const auto waits = Clock::now();
      ++batch;
      pass.waiting_ms += ms_since(waits);
    }
    pass.ms = ms_since(begin);
  };
  in_session(launch, "data", body, {}, {{"train", Dataset::from_hdf5({plan.path}, {.columns = plan.names()})}});
  return pass;
}

/// Returns the part of the time for which steps wait for data, if a step computes as long as it takes to read a batch.
/// The median of three passes, or of those that fit into the time.
double waiting_share(Launch& launch, const DatasetPlan& plan, bool shuffle, double pass_ms, const Rounds& rounds) {
  const auto batches = static_cast<double>((plan.samples + plan.batch - 1) / plan.batch);
  std::vector<double> shares;
  for (RoundTimer timer({3, rounds.end}); timer.has_next();) {
    const auto pass = read_pass(launch, plan, shuffle, pass_ms / batches);
    shares.push_back(pass.waiting_ms / pass.ms);
  }
  return median(shares);
}

PassFigures figures(const DatasetPlan& plan, const std::vector<double>& ms, const std::vector<double>& first_batch_ms) {
  const auto samples = static_cast<double>(plan.samples);
  const auto speed = [&](double pass_ms) { return 1000 * samples / pass_ms; };
  return {.samples = plan.samples,
          .batch = plan.batch,
          .samples_per_s = speed(median(ms)),
          .slowest = speed(std::ranges::max(ms)),
          .fastest = speed(std::ranges::min(ms)),
          .bytes_per_s = speed(median(ms)) * static_cast<double>(plan.sample_bytes),
          .first_batch_ms = median(first_batch_ms)};
}

/// Returns the mean time of `passes` passes. Short passes are repeated, so that noise averages out.
template <class OnePass>
double mean_ms(int passes, OnePass&& one_pass) {
  double ms = 0;
  for (int i = 0; i < passes; ++i) ms += one_pass();
  return ms / passes;
}

Row measure_passes(Launch& launch, const std::string& name, const Options& options, const Measurement& measurement) {
  const auto plan = plan_of(options.file, options.batch, most_bytes);
  const bool shuffle = name == shuffled_case;
  std::vector<double> first_batch_ms;
  const auto muster = [&] {
    const auto pass = read_pass(launch, plan, shuffle, 0);
    first_batch_ms.push_back(pass.first_batch_ms);
    return pass.ms;
  };
  const auto plain = [&] {
    const PlainReader reader(plan, shuffle);
    const auto begin = Clock::now();
    reader.read();
    return ms_since(begin);
  };
  Timings timings{{ours, PlainReader::name(plan), twin}, std::vector<std::vector<double>>(3)};
  const std::function<double()> candidates[] = {muster, plain, muster};
  measurement.show("warming up");
  plain();
  muster();
  const double pass_ms = muster();
  const auto passes = static_cast<int>(std::clamp(wanted_round_ms / pass_ms, 1.0, 50.0));
  first_batch_ms.clear();
  auto rounds = measurement.rounds;
  // Leave time for waiting_share(), whose passes compute as long as they read.
  if (rounds.end) *rounds.end -= std::chrono::milliseconds(std::lround(6 * pass_ms));
  RoundTimer timer(rounds);
  for (int round = 0; timer.has_next(); ++round) {
    measurement.show(timer.text());
    for (const auto index : rotation(round, 3)) timings.ms[index].push_back(mean_ms(passes, candidates[index]));
    measurement.keep(timings);
  }
  auto row = make_row(name, timings);
  row.pass = figures(plan, timings.ms[0], first_batch_ms);
  row.pass->waiting = waiting_share(launch, plan, shuffle, median(timings.ms[0]), measurement.rounds);
  row.notes = {PlainReader::description(plan),
               "each pass opens the dataset anew and decodes it, as the first pass of a training; the file is in the "
               "system's cache if that has room for it"};
  return row;
}

}  // namespace

Benchmark data() {
  return {.cases = {shuffled_case, sequential_case},
          .check_file = [](const std::string& path) { Dataset(path).count(); },
          .measure_in_process = measure_passes};
}

}  // namespace muster::bench
