// The page: one HTML file with its data, its style and its scripts.
#pragma once

#include <muster/json.hpp>

#include <string>

namespace muster::tool::report {

/// Every page begins with this text, by which a page is recognised.
extern const char* const page_begin;

/// Returns the page that shows `data`: {"version", "made", "runs": […], "sweeps": […]}.
std::string page_of(const Json& data);

}  // namespace muster::tool::report
