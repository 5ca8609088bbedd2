// How a preprocessor is applied to a batch: on which thread, and from which generator it draws random numbers.
#pragma once

#include "muster/preprocessor.hpp"

#include <ATen/core/Generator.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace muster::detail::data {

/// A generator on the CPU, with that seed.
at::Generator make_generator(std::uint64_t seed);

/// An Error (ExitCode::data) where the batch has another number of rows afterwards.
void apply(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator);

/// The same on a thread that reads ahead. False, and the batch is as it was, if the preprocessor takes no generator: it
/// draws from torch's default one, which belongs to the thread that trains.
bool try_apply_ahead(const Preprocessor& preprocessor, Batch& batch, at::Generator& generator);

/// Whether it is known that it has not been fitted. A class of the user's need not say whether it has.
bool is_unfitted(const Preprocessor& preprocessor);

/// Appends the preprocessor; of a chain its steps.
void add_steps(std::shared_ptr<const Preprocessor> preprocessor,
               std::vector<std::shared_ptr<const Preprocessor>>& steps);

}  // namespace muster::detail::data
