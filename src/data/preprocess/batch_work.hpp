// The work on a batch between reading and use: preprocessors and functions of map_batches().
#pragma once

#include "data/sources/source.hpp"
#include "muster/dataset.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

namespace muster::detail::data {

/// The work of a preprocessor; a chain has a piece for each of its steps.
std::vector<BatchWork> work_of(std::shared_ptr<const Preprocessor> preprocessor, int threads);
/// The work of a function of map_batches().
BatchWork work_of(std::variant<BatchFunction::WithGenerator, BatchFunction::Plain> function, int threads);
/// A source that does `work` on each batch of `source`, after the work of `source` itself.
std::shared_ptr<Source> transformed_source(std::shared_ptr<Source> source, std::vector<BatchWork> work);
/// Adds `work` after the batch's own. A batch without a generator gets one with the seed `seed`.
void add_work(ReadBatch& read, std::span<const BatchWork> work, std::uint64_t seed);

/// Does the first piece of the work without removing it. Returns false if it must be done on the thread that iterates.
bool run_first(ReadBatch& read, bool ahead);
/// Does all work that is left, on this thread.
Batch finished(ReadBatch read);

}  // namespace muster::detail::data
