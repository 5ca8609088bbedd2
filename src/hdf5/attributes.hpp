// The attributes of a dataset.
#pragma once

#include "hdf5/handle.hpp"

#include <string>
#include <vector>

namespace muster::detail::hdf5 {

/// The numbers of an attribute. It may hold them as text, as in "-9999" and "0, 100"; a space must follow a comma. None
/// if there is no such attribute, or if it holds neither numbers nor text. Throws an Error (ExitCode::data) if the text
/// holds something else or has a fixed length above 256 bytes, and for more than 1024 numbers or 64 strings.
std::vector<double> numbers_of_attribute(hid_t dataset, const char* name, const std::string& doing);
/// The text of an attribute; empty if there is no such attribute, or if it is not one string. Also empty for a string
/// of a fixed length above 256 bytes.
std::string text_of_attribute(hid_t dataset, const char* name, const std::string& doing);
/// The texts of an attribute of at most 32 strings, as text_of_attribute() reads them; none if it has more, or if there
/// is no such attribute.
std::vector<std::string> texts_of_attribute(hid_t dataset, const char* name, const std::string& doing);

}  // namespace muster::detail::hdf5
