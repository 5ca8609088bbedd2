// Whole processes beside each other: muster on several ranks, and torch's own launchers in Python.
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

/// Milliseconds, from what a program printed last.
using Reading = std::function<double(const Finished&, const nlohmann::ordered_json&)>;

/// Each program once in every round, one at a time, in rotated order. `line` shows which one runs, after `what`.
Timings alternate(const std::vector<Program>& programs, const Options& options, const Reading& read,
                  tool::ProgressLine& line, const std::string& what);

/// Python programs that are compared with, in a folder of their own.
class Peers {
 public:
  Peers();
  ~Peers();

  /// torchrun of that many ranks with DDP over gloo, at its best settings: one thread, the loopback device. Nothing
  /// where no Python has torch.
  std::optional<Program> torchrun(const std::string& name, int ranks, const std::vector<std::string>& arguments,
                                  const std::vector<std::string>& flags = {}) const;
  /// Ray Train's job of that name; nothing where no Python has it.
  std::optional<Program> ray_train(const std::string& job, int ranks) const;
  /// "NAMES are left out: …", with how to get the Python module.
  static std::string missing(const std::string& names, const std::string& module, const std::string& packages);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Adds torch's DDP to rows of `step`, without and with muster's settings of malloc, where options ask for peers.
void add_step_peers(std::vector<Row>& rows, const Options& options);

}  // namespace muster::bench
