// The programs that the benchmarks start: this tool on several ranks, and Python's launchers.
#pragma once

#include "process.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

/// Whether mpirun or srun has started this process as one of its ranks.
bool started_by_launcher();

/// `muster bench ARGUMENTS…` on that many ranks under mpirun, as root too and with more ranks than cores, not pinned.
/// An Error with ExitCode::missing_package where there is no mpirun.
Command on_ranks(int ranks, const std::vector<std::string>& arguments);

/// The same under `muster run`, which starts them again once.
Command supervised(int ranks, const std::vector<std::string>& arguments);

/// The Python that has those modules: of $VIRTUAL_ENV, of build/venv beside this tool's build, or in PATH.
std::optional<std::string> python_with(const std::vector<std::string>& modules);

/// In the environment: the folder that a benchmark has made for the jobs that it starts. It removes what a job that is
/// killed leaves in it.
inline constexpr const char* folder_variable = "MUSTER_BENCH_FOLDER";

/// A new folder that is removed with everything in it.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::filesystem::path& parent = std::filesystem::temp_directory_path());
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace muster::bench
