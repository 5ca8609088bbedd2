// Work of an operator's trainer on its workers, agreed on by all ranks of the launch.
#pragma once

#include "comm/on_ranks.hpp"
#include "run/resolve.hpp"
#include "run/run_folder.hpp"
#include "session/open_session.hpp"

#include <functional>
#include <string>

namespace muster::detail::operators {

/// The trainer is open until work throws, a rank is lost, or it is closed.
class OperatorRanks {
 public:
  OperatorRanks(const run::ResolvedOptions& resolved, run::RunFolder& run) : resolved_(resolved), run_(run) {}

  bool is_open() const noexcept { return is_open_; }
  void close() noexcept { is_open_ = false; }
  /// Throws an Error unless the trainer is open.
  void require_open() const;
  /// Runs `work` on the workers and returns its text on all ranks. If it throws on any worker, the trainer has ended
  /// and all ranks throw; then `session`, unless it is null, fails at once. Collective.
  std::string run(const std::function<std::string()>& work, session::OpenSession* session);
  /// Runs `check` on the workers. If it throws on any worker, all ranks throw the same and the trainer stays open.
  /// Collective.
  void require(const std::function<void()>& check);

 private:
  comm::Timeouts timeouts() const;

  const run::ResolvedOptions& resolved_;
  run::RunFolder& run_;
  bool is_open_ = true;
};

}  // namespace muster::detail::operators
