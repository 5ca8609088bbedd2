#include "alternate.hpp"

#include <algorithm>
#include <exception>

namespace muster::bench {
namespace {

/// The timeout of a program if the case has no time limit. torchrun is known to hang sometimes.
constexpr std::chrono::seconds default_timeout{300};

}  // namespace

Timings alternate(const std::vector<Program>& programs, const Measurement& measurement, const ReadTime& read) {
  Timings timings;
  for (const auto& program : programs) timings.candidates.push_back(program.name);
  timings.ms.resize(programs.size());
  std::vector<bool> failed(programs.size());
  const auto& end = measurement.rounds.end;
  RoundTimer timer(measurement.rounds);
  for (int round = 0; timer.has_next(); ++round) {
    auto left = std::ranges::count(failed, false);
    for (const auto index : rotation(round, programs.size())) {
      if (failed[index]) continue;
      auto [name, command] = programs[index];
      const bool is_ours = name == ours || name == twin;
      const auto now = Clock::now();
      // Muster's own programs do not hang, so they may use all of the remaining time.
      command.deadline = !end ? now + default_timeout : is_ours ? *end : now + (*end - now) / left;
      --left;
      measurement.show(name + ", " + timer.text());
      const auto finished = run(command);
      if (finished.end == End::interrupt) return timings;
      try {
        timings.ms[index].push_back(read(finished, result_of("running " + name, finished)));
      } catch (const std::exception& error) {
        if (is_ours) throw;
        failed[index] = true;
        measurement.warn(error.what());
      }
    }
  }
  return timings;
}

}  // namespace muster::bench
