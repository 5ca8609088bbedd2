// Comparisons of whole programs: in each round every program runs once, in rotated order.
#pragma once

#include "process.hpp"
#include "rounds.hpp"

#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <vector>

namespace muster::bench {

struct Program {
  std::string name;
  Command command;
};

/// Reads a time in milliseconds from a program's last line of output.
using Reading = std::function<double(const Finished&, const nlohmann::ordered_json&)>;

/// Runs each program once in every round, one at a time. A program that fails, or takes more than its part of the time
/// that is left, is warned of and has no further rounds; where the first program or its twin fails, this is thrown.
/// Ends early if a signal stops this program.
Timings alternate(const std::vector<Program>& programs, const Measurement& measurement, const Reading& read);

}  // namespace muster::bench
