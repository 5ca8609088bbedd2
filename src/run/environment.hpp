// Where a run is trained, and by which program, for params.json.
#pragma once

#include "muster/json.hpp"

#include <filesystem>
#include <string>

namespace muster::detail::run {

/// Returns these facts as this process sees them, without those that are unknown:
///
///   "mpi": "Open MPI v4.1.4", "libtorch": "2.13.0", "compiler": "12.2.0", "cpu": "AMD EPYC 7763"
///   "modules": ["gcc/12", "openmpi/4"]           the environment modules that are loaded
///   "program_commit": "3f2a…"                    of the Git checkout in which the program lies, or else the working
///                                                directory; the program may have been built from another one
///   "command": ["./fit", "--name", "demo"]
///   "launcher": ["mpirun", "-n", "4", …]         the outermost launcher above this process: mpirun, mpiexec, srun or
///                                                `muster run`; not if it runs on another node
Json environment();

/// Returns the commit of the Git checkout around the folder, read without Git; empty if there is none.
std::string git_commit(std::filesystem::path folder);

}  // namespace muster::detail::run
