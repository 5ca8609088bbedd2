// The peers in Python with which muster is compared: programs of torch's launcher, of mpirun with torch, and of Ray.
#pragma once

#include "alternate.hpp"
#include "bench.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

/// The Python programs that muster is compared with, in a temporary folder.
class Peers {
 public:
  /// `hosts`: those of the ranks, which must see the working directory; empty for this host.
  explicit Peers(std::string hosts = {});
  ~Peers();

  /// Returns torchrun on `ranks` ranks with DDP over gloo, in its fastest configuration: one thread per rank, the
  /// loopback device. None if no Python with torch is found.
  std::optional<Program> torchrun(const std::string& name, int ranks, const std::vector<std::string>& arguments,
                                  const std::vector<std::string>& flags = {}) const;
  /// Returns torchrun()'s job under mpirun on the hosts; none if no Python with torch is found.
  std::optional<Program> ddp_over_gloo(const std::string& name, int ranks,
                                       const std::vector<std::string>& arguments) const;
  /// Returns torchrun()'s job under mpirun, with DDP over muster; none if no Python has torch and muster_torch.
  std::optional<Program> ddp_over_muster(const std::string& name, int ranks,
                                         const std::vector<std::string>& arguments) const;
  /// Returns the job with this name under Ray Train; none if no Python with Ray is found.
  std::optional<Program> ray_train(const std::string& job, int ranks) const;
  /// Returns a note "NAMES: left out, …" that says how to install the Python module.
  static std::string note_of_missing(const std::string& names, const std::string& module, const std::string& packages);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Adds torch's DDP to a row of `step`: over gloo (on one host with and without muster's malloc settings), and over
/// muster. To a row of a program with its own loop, adds that program with muster's malloc settings instead. A row
/// without a peer gets a note.
void add_step_peers(Row& row, const Options& options, const Measurement& measurement);

}  // namespace muster::bench
