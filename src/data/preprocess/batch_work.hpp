// The work on a batch between reading and use: preprocessors and functions of map_batches().
#pragma once

#include "muster/dataset.hpp"

#include <ATen/core/Generator.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace muster::detail::data {

/// A piece of work, the same for all batches of a pass. May be called for several batches at once.
struct BatchWork {
  /// Works on the batch, with the batch's generator. `ahead` says that this is not the thread that iterates; there it
  /// may return false and leave the batch unchanged, and is called again on that thread.
  std::function<bool(Batch& batch, at::Generator& generator, bool ahead)> run;
  /// At most this many batches of a pass are in this work at once; with 1, one after the other in order. Empty: any
  /// number.
  std::optional<int> threads = {};
};

/// A batch that was read.
struct ReadBatch {
  ReadBatch(Batch read) : batch(std::move(read)) {}

  Batch batch;
  at::Generator generator = {};     ///< for its preprocessors and functions; undefined if it has none
  std::deque<BatchWork> work = {};  ///< what is left to do, in order
};

/// The work of a preprocessor; a chain has a piece for each of its steps.
std::vector<BatchWork> work_of(std::shared_ptr<const Preprocessor> preprocessor, int threads);
/// The work of a function of map_batches().
BatchWork work_of(std::variant<BatchFunction::WithGenerator, BatchFunction::Plain> function, int threads);
/// Adds `work` after the batch's own. A batch without a generator gets one with that seed.
void add_work(ReadBatch& read, std::span<const BatchWork> work, std::uint64_t seed);

/// Does the first piece of the work without removing it. Returns false if it must be done on the thread that iterates.
bool run_first(ReadBatch& read, bool ahead);
/// Does all work that is left, on this thread.
Batch finished(ReadBatch read);

}  // namespace muster::detail::data
