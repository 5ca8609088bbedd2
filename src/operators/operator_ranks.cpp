#include "operators/operator_ranks.hpp"

#include "comm/rank_status.hpp"
#include "comm/timeout.hpp"
#include "muster/error.hpp"

#include <chrono>

namespace muster::detail::operators {
namespace {

/// Ranks that do not train wait without a limit.
constexpr std::chrono::hours no_timeout{24 * 365};

}  // namespace

void OperatorRanks::require_open() const {
  if (is_open_) return;
  throw Error(ExitCode::user_error, "calling an operator's trainer", "it is shut down, or has ended with an error",
              "Make a new one");
}

comm::Timeouts OperatorRanks::timeouts() const {
  return {.done = resolved_.is_worker() ? resolved_.timeout : no_timeout,
          .failed = comm::final_grace(resolved_.world())};
}

void OperatorRanks::require(const std::function<void()>& check) {
  require_open();
  const auto& world = resolved_.world();
  try {
    const auto error = comm::attempt_on_all(world, timeouts(), [&] {
      if (resolved_.is_worker()) check();
    });
    if (error) throw *error;
  } catch (const comm::RanksMissing& lost) {
    is_open_ = false;
    run_.write_error(world, lost);
    throw;
  }
}

std::string OperatorRanks::run(const std::function<std::string()>& work, session::OpenSession* session) {
  require_open();
  const auto& world = resolved_.world();
  std::string result;
  try {
    const auto error = comm::attempt_on_all(world, timeouts(), [&] {
      if (resolved_.is_worker()) try {
          const auto call = [&] { result = work(); };
          session != nullptr ? session->run(call) : call();
        } catch (...) {
          // Before the session closes connections on which other ranks may be waiting.
          const auto cause = comm::current_outcome(world);
          comm::raise_alarm(world, cause);
          if (session != nullptr) session->fail(cause);
          throw;
        }
    });
    if (error) {
      is_open_ = false;
      if (world.rank() == 0 && error->code() != ExitCode::stopped) run_.write_error(error->what());
      throw *error;
    }
    return resolved_.worker_count < world.size() ? world.broadcast(result) : result;
  } catch (const comm::RanksMissing& lost) {
    is_open_ = false;
    run_.write_error(world, lost);
    throw;
  }
}

}  // namespace muster::detail::operators
