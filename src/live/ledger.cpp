#include "live/state.hpp"

#include <array>
#include <utility>

namespace muster::detail::live {

using Lock = std::unique_lock<std::mutex>;

void LiveState::require_solver() {
  if (has_solver) return;
  comm::run_on_all(launched, [&] { receiver.wait_for_solver(); });
  has_solver = true;
}
std::int64_t LiveState::identity() const {
  return static_cast<std::int64_t>(std::stoull(receiver.stream.token.substr(0, 15), nullptr, 16)) + number;
}
Sent LiveState::all_sent(const Communicator& over) {
  std::vector<std::int64_t> of_solvers;
  std::array<std::int64_t, 3> all{};
  {
    const Lock lock(receiver.mutex);
    for (const auto& sent : receiver.sent())
      of_solvers.insert(of_solvers.end(), {sent.sent, sent.dropped, sent.waited_ms});
    all = {receiver.sent_before().sent, receiver.sent_before().dropped, 0};
  }
  over.all_reduce(std::span(of_solvers), ReduceOp::max);  // a rank knows more than others of solvers on other nodes
  over.all_reduce(std::span(all));
  for (std::size_t i = 0; i < of_solvers.size(); ++i) all[i % 3] += of_solvers[i];
  return {all[0], all[1], all[2]};
}
LiveLedger LiveState::ledger(const Communicator& over) {
  std::array<std::int64_t, 9> all{};
  double waited_s = 0;
  {
    const Lock lock(receiver.mutex);
    receiver.end_pause();
    const auto& reservoir = receiver.reservoir();
    const auto& fates = reservoir.fates();
    all = {reservoir.waiting(),
           fates.used,
           fates.validation,
           fates.dropped,
           fates.lost,
           fates.draws,
           reservoir.size(),
           reservoir.drawable_capacity(),
           receiver.all_ended() ? 0 : 1};
    waited_s = wait_s;
  }
  over.all_reduce(std::span(all));
  const auto sent = all_sent(over);  // after the others, so that nothing that has come is missing in it
  LiveLedger ledger{.sent = sent.sent,
                    .waiting = all[0],
                    .used = all[1],
                    .validation = all[2],
                    .dropped_by_solver = sent.dropped,
                    .dropped_by_trainer = all[3],
                    .lost = all[4],
                    .draws = all[5],
                    .in_memory = all[6],
                    .room = all[7],
                    .solver_wait_s = static_cast<double>(sent.waited_ms) / 1000,
                    .trainer_wait_s = over.all_reduce(waited_s) / over.size()};
  const auto rest = ledger.sent - ledger.waiting - ledger.used - ledger.validation - ledger.dropped_by_solver -
                    ledger.dropped_by_trainer - ledger.lost;
  // What is still missing when all solvers have ended will not come any more.
  (all[8] > 0 ? ledger.on_its_way : ledger.lost) += rest;
  return ledger;
}

}  // namespace muster::detail::live
