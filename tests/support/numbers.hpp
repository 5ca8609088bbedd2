// Numbers on the command lines of test programs.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace muster::test {

/// The numbers of a text such as "12,64,64".
inline std::vector<std::int64_t> numbers(const std::string& text) {
  std::vector<std::int64_t> all;
  std::istringstream stream(text);
  for (std::string number; std::getline(stream, number, ',');) all.push_back(std::stoll(number));
  return all;
}

}  // namespace muster::test
