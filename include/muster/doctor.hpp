// Checks whether training would start on this machine or on the nodes of a launcher's ranks, for `muster doctor`.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace muster {

/// The result of one check.
struct Finding {
  enum class Severity {
    to_mend,   ///< training would not start, or not be of use: something must be installed or configured
    may_pass,  ///< training would not start now: a full disk, a node that does not answer
    warning,   ///< training would start, but be slower or lose something
    ok,
  };
  Severity severity = Severity::ok;
  std::string subject;                  ///< what was checked: "MPI"
  std::string fact;                     ///< a sentence without its full stop
  std::string remedy = {};              ///< a sentence without its full stop; empty for ok
  std::vector<std::string> hosts = {};  ///< the hosts that the finding is about
};

struct Examination {
  std::string host;      ///< the host of rank 0
  std::string launcher;  ///< "mpirun", "mpiexec", "srun", "PALS", "jsrun" or "Flux"; empty without one
  int ranks = 1;
  int nodes = 1;
  std::vector<Finding> findings = {};  ///< the worst first
  Json facts = Json::object();         ///< what was found, by host: an object for each

  /// missing_package if a finding is to_mend; otherwise retry if a finding is may_pass; otherwise done.
  MUSTER_API ExitCode exit_code() const;
};

struct DoctorOptions {
  std::filesystem::path storage = "runs";  ///< the folder to try; if it does not exist, its nearest parent that does
  /// A command that calls start_mpi_alone(). A process without a launcher runs it, since MPI's start may hang or end
  /// the process.
  std::vector<std::string> start_mpi = {};
};

/// Looks at this machine, or under a launcher at the nodes of all ranks; then it is collective and initialises MPI.
/// Calls `print` with the result on one rank, before any rank returns. Returns Examination::exit_code(), the same on
/// all ranks. If something hangs for a minute, prints that and ends the process with ExitCode::retry.
MUSTER_API ExitCode examine(const DoctorOptions& options, const std::function<void(const Examination&)>& print);

/// Initialises and finalises MPI. Returns true if several threads may call it at once.
MUSTER_API bool start_mpi_alone();

}  // namespace muster
