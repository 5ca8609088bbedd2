// Finds the data that comes with the examples.
#pragma once

#include <string>

namespace example {

/// Returns the path of a file in an example's folder data/: of the installed one if there is one, otherwise in the
/// source tree.
std::string data(const std::string& name, const std::string& file);

}  // namespace example
