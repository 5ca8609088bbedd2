// Muster's own preprocessors that have a state, and how each is made from its state in a checkpoint.
#pragma once

#include "base/export.hpp"
#include "muster/json.hpp"
#include "muster/preprocessor.hpp"

#include <functional>
#include <set>
#include <string>

namespace muster::detail::data {

/// True if `state` is the state of a scaler or encoder of muster's, or of a chain of them.
MUSTER_INTERNAL_API bool is_muster_preprocessor(const Json& state);
/// The columns that the preprocessor was fitted on.
MUSTER_INTERNAL_API std::set<std::string> fitted_columns(const Json& state);
/// Restores the preprocessor for the columns that are `wanted`; null if none is wanted.
MUSTER_INTERNAL_API PreprocessorPtr restore_preprocessor(const Json& state,
                                                         const std::function<bool(const std::string&)>& wanted);

}  // namespace muster::detail::data
