// The data that comes with the examples.
#pragma once

#include <string>

namespace example {

/// The path of a file in an example's folder data/: as installed with the program, otherwise in the source tree.
std::string data(const std::string& name, const std::string& file);

}  // namespace example
