// Compares whole programs: in each round every program runs once, in rotated order.
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

/// Returns the time in milliseconds that a finished program has taken. The JSON is its last line of output.
using ReadTime = std::function<double(const Finished&, const nlohmann::ordered_json&)>;

/// In every round, runs each program once, one at a time. If a program fails, or takes more than its part of the
/// remaining time, it is left out of further rounds, with a warning; but if muster or its twin fails, throws. Ends
/// early if a signal stops this program.
Timings alternate(const std::vector<Program>& programs, const Measurement& measurement, const ReadTime& read);

}  // namespace muster::bench
