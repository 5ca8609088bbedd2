// Describes a dataset for people.
#pragma once

#include <muster/config.hpp>

#include <string>

namespace muster::tool {

/// Formats the result of describe_dataset(), without its advice: a line for the file, and a table of its columns.
std::string dataset_text(const Json& dataset);

}  // namespace muster::tool
