// What a process finds around it: the name of its host, and its environment variables.
#pragma once

#include <unistd.h>

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail {

/// The name of this host; empty if the system does not tell it.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

/// The names of the environment variables that begin with `prefix`.
inline std::vector<std::string> variable_names(std::string_view prefix = "") {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (const std::string_view text = *entry; text.starts_with(prefix) && text.find('=') != text.npos)
      names.emplace_back(text.substr(0, text.find('=')));
  return names;
}

}  // namespace muster::detail
