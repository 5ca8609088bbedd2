#include "observe/sinks.hpp"

#include "base/log.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "observe/history.hpp"

namespace muster::detail::observe {

Sinks::Sinks(bool first_worker, const std::filesystem::path& run, Progress progress, std::int64_t first_epoch) {
  if (first_worker) {
    sinks_.push_back(std::make_unique<History>(run));
    auto line = std::make_unique<ProgressLine>(progress, first_epoch);
    line_ = line.get();
    sinks_.push_back(std::move(line));
  }
}

void Sinks::start(const Communicator& workers, const AttemptStart& start) {
  comm::run_on_root(workers, [&] { tell(&Sink::start, start); });
  if (workers.rank() != 0) tell(&Sink::start, start);
}

void Sinks::finish(const std::optional<Error>& failure) noexcept {
  for (const auto& sink : sinks_) try {
      failure ? sink->failure(*failure) : sink->end();
    } catch (...) {
      log::warn("telling an observer that training is over: " + comm::current_outcome().text);
    }
}

}  // namespace muster::detail::observe
