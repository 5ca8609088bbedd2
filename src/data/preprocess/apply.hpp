// Applies preprocessors to batches, on the right thread and with the right random generator.
#pragma once

#include "base/export.hpp"
#include "muster/preprocessor.hpp"

#include <ATen/core/Generator.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace muster::detail::data {

/// A CPU generator with the given seed.
MUSTER_INTERNAL_API at::Generator make_generator(std::uint64_t seed);

/// Applies the preprocessor. Throws an Error (ExitCode::data) if that changes the batch's number of rows.
MUSTER_INTERNAL_API void apply(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator);
/// Applies a function of map_batches() in the same way.
void apply(const BatchFunction::WithGenerator& function, Batch& batch, at::Generator& generator);
void apply(const BatchFunction::Plain& function, Batch& batch, at::Generator& generator);

/// Like apply(), but on a thread that reads ahead. Returns false and leaves the batch unchanged if the preprocessor
/// takes no generator: it may draw from torch's default generator, which belongs to the thread that trains.
bool try_apply_ahead(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator);

/// True if the preprocessor is known not to be fitted. False for a class of the user's, whose fitted() may not tell.
MUSTER_INTERNAL_API bool is_unfitted(const Preprocessor& preprocessor);

/// Appends the preprocessor to `steps`; appends the steps of a chain one by one.
void add_steps(std::shared_ptr<const Preprocessor> preprocessor,
               std::vector<std::shared_ptr<const Preprocessor>>& steps);

}  // namespace muster::detail::data
