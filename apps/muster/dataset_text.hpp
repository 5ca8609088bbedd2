// A dataset as a person reads it.
#pragma once

#include <muster/config.hpp>

#include <string>

namespace muster::tool {

/// What describe_dataset gives, without its advice: a line for the file, a table of its columns.
std::string dataset_text(const Json& dataset);

}  // namespace muster::tool
