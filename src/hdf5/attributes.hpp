// The attributes of a dataset.
#pragma once

#include "hdf5/handle.hpp"

#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// The values of a numeric attribute; none if there is no such attribute, or if it holds no numbers.
/// Throws an Error (ExitCode::data) if there are more than 1024.
std::vector<double> numbers_of_attribute(hid_t dataset, const char* name, const std::string& doing);
/// The text of an attribute; empty if there is no such attribute, or if it is not one short string.
std::string text_of_attribute(hid_t dataset, const char* name, const std::string& doing);

}  // namespace muster::detail::hdf5
