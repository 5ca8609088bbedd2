// The programs that the benchmarks start: this one on several ranks, and Python's launchers.
#pragma once

#include "process.hpp"

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace muster::bench {

/// True if mpirun or srun has started this process as one of its ranks.
bool started_by_launcher();

/// `muster-bench ARGUMENTS…` on that many ranks under mpirun, which may run as root, with more ranks than cores, and
/// does not bind them. Throws an Error with ExitCode::missing_package if there is no mpirun.
Command on_ranks(int ranks, const std::vector<std::string>& arguments);

/// Any program so, with its arguments.
Command under_mpirun(int ranks, const std::vector<std::string>& words);

/// The same under `muster run`, which may start the ranks again once.
Command supervised(int ranks, const std::vector<std::string>& arguments);

/// A Python that has those modules: that of $VIRTUAL_ENV, of build/venv beside this program's build, or in PATH.
std::optional<std::string> python_with(const std::vector<std::string>& modules);

/// The environment variable with the folder that a benchmark has made for its jobs. The benchmark removes what killed
/// jobs leave there.
inline constexpr const char* folder_variable = "MUSTER_BENCH_FOLDER";

/// A new folder; removed with everything in it by the destructor.
class ScratchFolder {
 public:
  /// In TMPDIR, or in /tmp if that is unset or empty.
  ScratchFolder();
  explicit ScratchFolder(const std::filesystem::path& parent);
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace muster::bench
