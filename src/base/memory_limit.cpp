#include "base/memory_limit.hpp"

#include "base/control_groups.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <string>

namespace muster::detail {
namespace {

namespace fs = std::filesystem;

std::atomic<double> limit_for_tests = 0;

/// The bytes that a control group grants. Without a limit, version 2 has "max", for which this returns infinity, and
/// version 1 has a number larger than any memory, which this returns as it is.
double limit_of_group(const fs::path& folder) {
  for (const char* const name : {"memory.max", "memory.limit_in_bytes"})
    if (double bytes = 0; std::ifstream(folder / name) >> bytes) return bytes;
  return HUGE_VAL;
}

}  // namespace

double memory_limit(const fs::path& root) {
  if (const auto bytes = limit_for_tests.load(); bytes > 0) return bytes;
  double least = HUGE_VAL;
  std::ifstream lines(root / "proc/meminfo");
  for (std::string name, rest; lines >> name; std::getline(lines, rest))
    if (double kilobytes = 0; name == "MemTotal:" && lines >> kilobytes) least = 1024 * kilobytes;
  for_each_control_group("memory", root,
                         [&](const fs::path& group) { least = std::min(least, limit_of_group(group)); });
  return least;
}

void set_memory_limit(double bytes) noexcept { limit_for_tests = bytes; }

}  // namespace muster::detail
