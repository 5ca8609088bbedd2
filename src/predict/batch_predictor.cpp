#include "base/file.hpp"
#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "data/passes/batches.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "muster/launch.hpp"
#include "muster/predictor.hpp"
#include "predict/prediction_file.hpp"
#include "run/device.hpp"
#include "run/same_data.hpp"
#include "watch/record.hpp"

#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>
#include <optional>

namespace muster {
namespace {

using namespace detail;

/// The rows of a dataset, divided into blocks of `batch_size` rows; the last may be smaller. A block becomes a batch.
struct Blocks {
  std::int64_t rows, batch_size;

  std::int64_t count() const noexcept { return (rows - 1) / batch_size + 1; }
  data::SampleRange rows_of(std::int64_t block) const noexcept {
    return {block * batch_size, std::min(batch_size, rows - block * batch_size)};
  }
};

data::ReadBatch read(data::Source& source, data::SampleRange rows) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(rows.count));
  std::iota(samples.begin(), samples.end(), rows.first);
  return source.read_ahead(samples, static_cast<std::uint64_t>(rows.first));
}

/// Throws an Error, the same on all ranks, if the ranks have different columns. `mine`: the columns as text; empty on a
/// rank without rows.
void require_same_columns(const Communicator& world, const std::string& mine) {
  const auto of_rank = world.all_gather(mine);
  for (std::size_t rank = 1; rank < of_rank.size(); ++rank)
    if (!of_rank[rank].empty() && of_rank[rank] != of_rank.front())
      throw Error(ExitCode::data, "predicting",
                  detail::str("the columns are ", of_rank.front(), " on rank 0 and ", of_rank[rank], " on rank ", rank),
                  "Use the same model and options on every rank");
}

/// Throws an Error if `output` cannot be written, or is a file of the dataset.
void require_new_file(const std::filesystem::path& output, const data::Source& source) {
  require_output(output);
  for (const auto& file : source.files())
    if (std::error_code none; std::filesystem::equivalent(file, output, none))
      throw Error(ExitCode::usage, "writing " + output.string(), "it is a file of the dataset", "Choose another name");
}

}  // namespace

void BatchPredictor::predict(const Launch& launch, const Dataset& dataset, const std::filesystem::path& output,
                             const BatchPredictorOptions& options) const {
  const watch::ScopedCallName call("predicting");
  const auto& world = launch.communicator();
  const auto timeout = comm::timeout(world);
  const auto work = [&] {
    auto same = predictor_.options_to_compare();
    same.update({{"batch_size", options.batch_size}, {"keep_columns", options.keep_columns}});
    comm::require_same_options(world, "a prediction", same);
    if (options.batch_size < 1)
      throw Error(ExitCode::usage, "predicting", "batch_size is less than 1", "Give at least 1");
    at::set_num_threads(launch.threads_per_rank());
    const c10::DeviceGuard own(run::choose_device(predictor_.uses_gpu(), launch));
    if (predictor_.uses_gpu()) run::warn_of_shared_gpus(launch);
    auto& source = *data::source_of(dataset);
    comm::run_on_root(world, [&] { require_new_file(output, source); });
    for (auto name = options.keep_columns.begin(); name != options.keep_columns.end(); ++name)
      if (std::find(options.keep_columns.begin(), name, *name) != name)
        throw Error(ExitCode::usage, "keeping columns", "\"" + *name + "\" is kept twice", "Name each column once");
    for (const auto& name : options.keep_columns)
      if (data::is_ragged(data::column_of(source, name, "keeping columns")))
        throw Error(ExitCode::usage, "keeping columns",
                    "the samples of \"" + name + "\" are of different length, and a column of a file has one",
                    "Keep other columns");
    run::require_same_data(world, world.size(), {{"to predict", source.fingerprint()}});

    const Blocks blocks{source.count(), options.batch_size};
    const auto mine = data::share_of(blocks.count(), world.size(), world.rank());
    data::Prefetch batches(
        [&, next = mine.first]() mutable -> std::optional<data::ReadBatch> {
          if (next == mine.first + mine.count) return {};
          return read(source, blocks.rows_of(next++));
        },
        /*ahead=*/1, source.threads());
    const auto next = [&]() -> std::optional<Batch> {
      const auto batch = batches.next();
      if (!batch) return {};
      const auto prediction = predictor_.predict(*batch, options.keep_columns);
      for (const auto& [name, tensor] : prediction.columns())
        if (tensor.layout() != at::kStrided || tensor.is_quantized())
          throw Error(ExitCode::usage, "predicting",
                      "the model's \"" + name + "\" is not a dense tensor of plain values",
                      "Have it return to_dense() or dequantize()");
      std::vector<Batch::Item> columns(prediction.columns().begin(), prediction.columns().end());
      for (const auto& name : options.keep_columns) {
        if (prediction.columns().contains(name))
          throw Error(ExitCode::usage, "keeping columns", "the model gives a column \"" + name + "\" too",
                      "Give one of them another name");
        columns.emplace_back(name, (*batch)[name]);
      }
      return Batch(std::move(columns));
    };

    auto rows = next();
    const auto schema = rows ? data::schema_of(*rows) : Schema{};
    require_same_columns(world, data::schema_text(schema));
    detail::predict::PredictionFile file(world, output, schema, blocks.rows);
    // A barrier after each batch makes the other ranks notice an error of one rank within a batch.
    for (std::int64_t round = 0; round < data::share_of(blocks.count(), world.size(), 0).count; ++round) {
      if (rows && data::schema_of(*rows) != schema)
        throw Error(ExitCode::data, "predicting",
                    "the model gives " + data::schema_text(data::schema_of(*rows)) +
                        ", but for an earlier batch it gave " + data::schema_text(schema),
                    "Have it give the same columns for every batch");
      if (rows) file.write(*rows, blocks.rows_of(mine.first + round).first);
      rows = next();
      world.barrier();
    }
    file.finish();
    world.barrier();
    file.put_in_place();
  };
  if (const auto error = comm::attempt_on_all(world, {.done = timeout, .failed = timeout}, work)) throw *error;
}

}  // namespace muster
