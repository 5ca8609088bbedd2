// Comparisons of whole processes: muster on several ranks, and torch's own launchers in Python.
#pragma once

#include "../progress_line.hpp"
#include "bench.hpp"
#include "process.hpp"

#include <nlohmann/json.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

struct Program {
  std::string name;
  Command command;
};

/// Reads a time in milliseconds from a program's last line of output.
using Reading = std::function<double(const Finished&, const nlohmann::ordered_json&)>;

/// Runs each program once in every round, one at a time, in rotated order. `line` shows `what` and the current program.
Timings alternate(const std::vector<Program>& programs, const Options& options, const Reading& read,
                  tool::ProgressLine& line, const std::string& what);

/// The Python programs that muster is compared with, in a temporary folder.
class Peers {
 public:
  Peers();
  ~Peers();

  /// torchrun on that many ranks with DDP over gloo, with its best settings: one thread, the loopback device. Empty if
  /// no Python with torch is found.
  std::optional<Program> torchrun(const std::string& name, int ranks, const std::vector<std::string>& arguments,
                                  const std::vector<std::string>& flags = {}) const;
  /// The job of that name under Ray Train; empty if no Python with Ray is found.
  std::optional<Program> ray_train(const std::string& job, int ranks) const;
  /// A note "NAMES: left out, …", with instructions for installing the Python module.
  static std::string missing(const std::string& names, const std::string& module, const std::string& packages);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// If the options ask for peers, adds torch's DDP to rows of `step`, with and without muster's malloc settings.
void add_step_peers(std::vector<Row>& rows, const Options& options);

}  // namespace muster::bench
