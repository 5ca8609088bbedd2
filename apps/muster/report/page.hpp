// The page: one HTML file that holds its data, its style and its scripts.
#pragma once

#include <muster/json.hpp>

#include <string>

namespace muster::tool::report {

/// The beginning of every page, by which an older one is recognised.
extern const char* const page_begin;

/// The page that shows `data`: {"version", "made", "runs": […], "sweeps": […]}.
std::string page_of(const Json& data);

}  // namespace muster::tool::report
