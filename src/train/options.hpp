// Options from JSON, as to_json and from_json of muster/json.hpp have it: what cannot be one.
#pragma once

#include "muster/error.hpp"

#include <string>

namespace muster::detail::train {

/// A value that an option cannot have. Whoever knows the file says so in an Error of its own.
struct InvalidOption : Error {
  InvalidOption(std::string which, std::string what)
      : Error(ExitCode::data, "reading options", (which.empty() ? "the JSON" : which) + " " + what, "Mend it"),
        key(std::move(which)),
        fact(std::move(what)) {}
  std::string key;  ///< and those that it lies under: "scaling_config" "num_workers"; empty for the whole
  std::string fact;
};

inline void require(bool holds, const std::string& fact) {
  if (!holds) throw InvalidOption("", fact);
}

/// What `read` finds invalid lies under `key`.
template <class Read>
void under(const std::string& key, const Read& read) {
  try {
    read();
  } catch (const InvalidOption& error) {
    throw InvalidOption('"' + key + '"' + (error.key.empty() ? "" : " ") + error.key, error.fact);
  }
}

}  // namespace muster::detail::train
