// The preprocessor that a checkpoint has the state of, where it is one of muster's.
#pragma once

#include "muster/json.hpp"
#include "muster/preprocessor.hpp"

#include <functional>
#include <set>
#include <string>

namespace muster::detail::predict {

/// Whether that is the state of one that muster makes, or of a chain of such.
bool is_ours(const Json& state);
/// The columns that it was fitted on.
std::set<std::string> columns_of(const Json& state);
/// The same preprocessor over those of its columns that are `wanted`; null if none is.
PreprocessorPtr restored(const Json& state, const std::function<bool(const std::string&)>& wanted);

}  // namespace muster::detail::predict
