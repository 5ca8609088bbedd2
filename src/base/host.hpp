// What a process can find out from the system: the name of its host, its environment variables, the first line of a
// file.
#pragma once

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail {

using Environment = std::function<const char*(const char*)>;  ///< like std::getenv

/// The value of a variable; empty if it is not set.
inline std::string value_of(const std::string& variable, const Environment& environment = ::getenv) {
  const char* const value = environment(variable.c_str());
  return value == nullptr ? "" : value;
}

/// The name of this host; empty if the system does not tell it.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

/// The first line of the file; empty if the file cannot be read.
inline std::string first_line(const std::filesystem::path& file) {
  std::string line;
  std::getline(std::ifstream(file), line);
  return line;
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
