// The programs that the benchmarks start: this program on several ranks, and Python's launchers.
#pragma once

#include "process.hpp"

#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

/// True if mpirun or srun has started this process as one of its ranks.
bool started_by_launcher();

/// Returns `muster-bench ARGUMENTS…` on `ranks` ranks under mpirun, set up so that it may run as root, with more ranks
/// than cores, and binds no ranks. `hosts`: "n1:1,n2:1"; empty for this host. Throws an Error
/// (ExitCode::missing_package) if there is no mpirun.
Command on_ranks(int ranks, const std::vector<std::string>& arguments, const std::string& hosts = {});

/// Like on_ranks(), for any program: `words` are the program and its arguments.
Command under_mpirun(int ranks, const std::vector<std::string>& words, const std::string& hosts = {});

/// Returns `muster-bench ARGUMENTS…` on `ranks` ranks under `muster run`, which may start the ranks once more.
Command supervised(int ranks, const std::vector<std::string>& arguments);

/// Returns a Python that has these modules: that of $VIRTUAL_ENV, that of build/venv beside this program's build, or
/// the one in PATH; none if none has them.
std::optional<std::string> python_with(const std::vector<std::string>& modules);

/// The environment variable that tells a benchmark's jobs the folder made for them. The benchmark removes what killed
/// jobs leave there.
inline constexpr const char* folder_variable = "MUSTER_BENCH_FOLDER";

}  // namespace muster::bench
