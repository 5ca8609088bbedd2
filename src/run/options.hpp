// Errors for options that are read from JSON; see to_json and from_json in muster/json.hpp.
#pragma once

#include "muster/error.hpp"

#include <string>

namespace muster::detail::run {

/// An option has an invalid value. A caller that reads a file turns it into an Error that names the file.
struct InvalidOption : Error {
  InvalidOption(std::string which, std::string what)
      : Error(ExitCode::data, "reading options", (which.empty() ? "the JSON" : which) + " " + what, "Correct it"),
        key(std::move(which)),
        fact(std::move(what)) {}
  std::string key;  ///< with its parents, as "scaling_config" "num_workers"; empty for the whole JSON
  std::string fact;
};

inline void require_valid(bool holds, const std::string& fact) {
  if (!holds) throw InvalidOption("", fact);
}

/// Calls `read`, and adds `key` as a parent to the key of an InvalidOption.
template <class Read>
void with_parent_key(const std::string& key, const Read& read) {
  try {
    read();
  } catch (const InvalidOption& error) {
    throw InvalidOption('"' + key + '"' + (error.key.empty() ? "" : " ") + error.key, error.fact);
  }
}

}  // namespace muster::detail::run
