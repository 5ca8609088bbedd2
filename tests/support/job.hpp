// Starts a run on all ranks of a test as a program's main would.
#pragma once

#include "muster/muster.hpp"
#include "support/world.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::test {

/// 46 samples of y = 3x − 1: the last step is never full, and has two samples or more on each of 1 to 4 ranks, as
/// batch-norm wants.
inline Dataset line() {
  const auto x = at::arange(46, at::kFloat).unsqueeze(1) / 46;
  return Dataset::from_tensors({{"x", x}, {"y", 3 * x - 1}});
}

struct Job {
  std::filesystem::path storage;
  std::vector<std::string> flags = {};
  TorchTrainerOptions options = {};
};

/// The flags, with these values of flags that are not among them: a flag may be given once.
inline std::vector<std::string> with_defaults(std::vector<std::string> flags,
                                              const std::vector<std::pair<std::string, std::string>>& defaults) {
  for (const auto& [flag, value] : defaults)
    if (std::ranges::find(flags, flag) == flags.end()) flags.insert(flags.end(), {flag, value});
  return flags;
}

/// The exit code of a main with these flags, which calls `body` with its launch.
template <class Body>
int main_with(std::vector<std::string> flags, const Body& body) {
  flags.insert(flags.begin(), "job");
  std::vector<char*> argv;
  for (auto& word : flags) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  return launch.run([&] { return body(launch); });
}

/// Calls `fit` with a launch that has the job's storage and flags; returns the exit code and the Result.
inline std::pair<int, std::optional<Result>> launch(const Job& job, const std::function<Result(Launch&)>& fit) {
  const auto flags =
      with_defaults(job.flags, {{"--storage", job.storage.string()}, {"--progress", "none"}, {"--log-level", "error"}});
  std::optional<Result> result;
  const int code = main_with(flags, [&](Launch& launch) { return *(result = fit(launch)); });
  return {code, result};
}

/// The same for a TorchTrainer with the job's options.
inline std::pair<int, std::optional<Result>> run(const Job& job,
                                                 const std::function<void(Session&, const Config&)>& loop) {
  return launch(job, [&](Launch& launch) { return TorchTrainer(launch, loop, job.options).fit(); });
}

}  // namespace muster::test
