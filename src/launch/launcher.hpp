// Whether the launcher started one world of N ranks, as was meant, or N worlds of one rank each.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace muster::detail::launch {

using Environment = std::function<const char*(const char*)>;  ///< as std::getenv

/// N worlds of one rank.
struct SeparateWorlds {
  int tasks = 0;     ///< processes that the launcher says it started
  int task = 0;      ///< this one's number among them
  std::string fact;  ///< for the error text
  std::string remedy;
};

/// Before MPI is initialised: srun started several tasks and speaks no PMIx, in which case an Open MPI built as
/// Debian's is fails in MPI_Init. SLURM_NTASKS is not asked: it is set in a batch script's own process too.
std::optional<SeparateWorlds> srun_without_pmix(const Environment& environment);

/// After it: MPI has one rank, the launcher started several processes.
std::optional<SeparateWorlds> separate_worlds(const Environment& environment, int world_size);

}  // namespace muster::detail::launch
