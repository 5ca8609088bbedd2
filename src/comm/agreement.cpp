#include "comm/agreement.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace muster::detail::comm {
namespace {

/// Each rank's outcome, and the attempt that it came from.
struct Outcomes {
  std::vector<Outcome> of_rank;
  std::vector<bool> raised;  ///< [rank]: it has raised an alarm
  std::vector<int> depths;   ///< [rank]: of nested attempts
};

/// Sends this rank's outcome to all ranks of a world, and receives theirs.
class OutcomeExchange {
 public:
  OutcomeExchange(World& world, int rank, const Outcome& mine)
      : world_(world), rank_(static_cast<std::size_t>(rank)), size_(world.members.size()) {
    // What this rank has raised stays its outcome: other ranks may have left because of it.
    const auto raised = world_.alarm.raised();
    memory_->mine = {static_cast<char>(raised.has_value()), static_cast<char>(world_.depth)};
    memory_->mine += pack(raised.value_or(mine), longest - fields - packed_fields);
    memory_->theirs.resize(size_);
    memory_->receives.assign(size_, MPI_REQUEST_NULL);
    memory_->sends.assign(size_, MPI_REQUEST_NULL);
    memory_->lengths.assign(size_, -1);
    const MPI_Comm comm = world_.agreement;
    for (std::size_t r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const int other = static_cast<int>(r);
      memory_->theirs[r].resize(longest);
      check(MPI_Irecv(memory_->theirs[r].data(), static_cast<int>(longest), MPI_BYTE, other, 0, comm,
                      &memory_->receives[r]),
            "MPI_Irecv");
      check(MPI_Isend(memory_->mine.data(), static_cast<int>(memory_->mine.size()), MPI_BYTE, other, 0, comm,
                      &memory_->sends[r]),
            "MPI_Isend");
    }
  }

  OutcomeExchange(const OutcomeExchange&) = delete;
  OutcomeExchange& operator=(const OutcomeExchange&) = delete;
  /// If this rank has given up waiting, MPI may still use the memory.
  ~OutcomeExchange() {
    if (!finished_) world_.agreement->abandon(memory_->receives, memory_->sends, memory_);
  }

  /// Makes progress. True if the outcomes of all ranks are here and all have this rank's.
  bool advance() {
    bool all = true;
    for (std::size_t r = 0; r < size_; ++r) {
      if (r == rank_ || memory_->lengths[r] >= 0) continue;
      int flag = 0;
      MPI_Status status;
      check(MPI_Test(&memory_->receives[r], &flag, &status), "MPI_Test");
      if (flag) check(MPI_Get_count(&status, MPI_BYTE, &memory_->lengths[r]), "MPI_Get_count");
      all = all && flag;
    }
    int sent = 0;
    check(MPI_Testall(static_cast<int>(size_), memory_->sends.data(), &sent, MPI_STATUSES_IGNORE), "MPI_Testall");
    return finished_ = all && sent;
  }

  /// The ranks whose outcome is not here yet.
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < size_; ++r)
      if (r != rank_ && memory_->lengths[r] < 0) ranks.push_back(static_cast<int>(r));
    return ranks;
  }

  /// Call it when no rank is missing.
  Outcomes take() const {
    Outcomes all{std::vector<Outcome>(size_), std::vector<bool>(size_), std::vector<int>(size_)};
    for (std::size_t r = 0; r < size_; ++r) {
      std::string_view bytes = memory_->mine;
      if (r != rank_)
        bytes = std::string_view(memory_->theirs[r]).substr(0, static_cast<std::size_t>(memory_->lengths[r]));
      all.raised[r] = bytes[0] != 0;
      all.depths[r] = bytes[1];
      all.of_rank[r] = unpack(bytes.substr(fields));
    }
    return all;
  }

 private:
  static constexpr std::size_t longest = 8 * 1024;  ///< bytes of a message
  static constexpr std::size_t fields = 2;          ///< bytes before the packed outcome: alarm raised, depth

  struct Memory {
    std::string mine;
    std::vector<std::string> theirs;
    std::vector<MPI_Request> receives, sends;
    std::vector<int> lengths;
  };

  World& world_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  bool finished_ = false;
};

/// Returns the outcomes. If no rank has failed but the ranks are at different nesting depths, every outcome becomes the
/// error that says so.
std::vector<Outcome> with_depth_mismatch(std::vector<Outcome> outcomes, const std::vector<int>& depths) {
  const auto least = std::ranges::min_element(depths), most = std::ranges::max_element(depths);  // the lowest ranks
  const bool all_done = std::ranges::all_of(outcomes, [](const Outcome& o) { return o.kind == Outcome::Kind::done; });
  if (*least == *most || !all_done) return outcomes;
  const Error mismatch(ExitCode::user_error, "waiting for all ranks",
                       "rank " + std::to_string(most - depths.begin()) + " is in a call that rank " +
                           std::to_string(least - depths.begin()) + " does not make",
                       "Make collective calls on all ranks alike");
  for (auto& outcome : outcomes) outcome = {Outcome::Kind::failed, mismatch.code(), /*agreed=*/true, mismatch.what()};
  return outcomes;
}

/// The error if `missing` ranks did not come. `stalled`: the rank that has waited too long, if one has.
RanksMissing ranks_missing(const World& world, int rank, const std::vector<int>& missing, std::optional<int> stalled,
                           std::chrono::nanoseconds waited, const WaitMonitor::Decision& decision) {
  using namespace std::chrono_literals;
  int lowest_here = 0;
  std::string names;
  for (const int r : missing) {
    if (r == lowest_here) ++lowest_here;
    names += (names.empty() ? "" : ", ") + std::to_string(r) + " (" +
             world.placement.hosts[static_cast<std::size_t>(r)] + ")";
  }
  // The rank that waited too long reports first, as it knows most; without one, the lowest rank that came.
  const bool first = stalled.value_or(lowest_here) == rank;
  const auto seconds = std::chrono::round<std::chrono::seconds>(waited).count();
  return {Error(ExitCode::retry, "waiting for all ranks to agree",
                "no word within " + std::to_string(seconds) + " s from rank " + names +
                    (decision.fact.empty() ? "" : ": " + decision.fact),
                "It is stuck or lost; start the job again" + decision.details),
          first ? 0ms : 2000ms};
}

/// Exchanges outcomes with all ranks. Throws RanksMissing as agree() does.
Outcomes exchange_outcomes(const Communicator& communicator, World& world, const Outcome& mine,
                           std::chrono::milliseconds limit) {
  OutcomeExchange exchange(world, communicator.rank(), mine);
  const auto number = static_cast<std::uint64_t>(world.agreements + 1);
  auto& calls = world.wait_monitor.own_record().calls;
  const auto ticket =
      calls.begin(0, number, {.kind = node::Call::Kind::end, .root = static_cast<int>(mine.kind)}, nullptr);
  const WaitedFor end{0, number, Channel::of(communicator)->world_ranks};
  const auto begun = watch::now();
  std::optional<std::chrono::nanoseconds> given_up;  // when this rank learnt that some rank has waited too long
  const auto received_or_given_up = [&] {
    if (exchange.advance()) return true;
    // Other ranks may still need this rank's part in operations that it has started and does not wait for.
    if (mine.kind == Outcome::Kind::done) Channel::advance_all();
    world.alarm.poll();
    if (!given_up && world.alarm.stalled()) given_up = watch::now();
    return given_up && watch::now() > *given_up + stall_grace;
  };
  WaitMonitor::Decision decision;
  for (auto more = limit; more.count() > 0 && !wait_until(received_or_given_up, more);) {
    const auto late = exchange.missing();
    decision = world.wait_monitor.decide(end, begun, limit, &late);
    more = decision.more;
  }
  if (const auto missing = exchange.missing(); !missing.empty())
    throw ranks_missing(world, communicator.rank(), missing, given_up ? world.alarm.stalled() : std::nullopt,
                        watch::now() - begun, decision);
  calls.end(ticket);
  return exchange.take();
}

}  // namespace

Outcome current_outcome(const Communicator& world) {
  auto& alarm = Channel::of(world)->world->alarm;
  if (const auto raised = alarm.raised()) return *raised;
  auto mine = current_outcome();
  if (mine.kind != Outcome::Kind::failed) return mine;
  try {
    alarm.throw_if_raised();
  } catch (const RemoteError& theirs) {
    // If another rank has raised the same error, this rank has failed by itself too.
    if (!std::string_view(theirs.what()).ends_with(mine.text)) mine.kind = Outcome::Kind::interrupted;
  }
  return mine;
}

void throw_if_alarm_raised(const Communicator& communicator) {
  Channel::of(communicator)->world->alarm.throw_if_raised();
}

void raise_alarm(const Communicator& communicator, const Outcome& mine) {
  auto& world = *Channel::of(communicator)->world;
  // An error that ranks have agreed on (`outer`) is known to all of them already.
  if (mine.kind == Outcome::Kind::failed && !world.outer) world.alarm.raise(mine);
}

NestedAttempt::NestedAttempt(const Communicator& world) : depth_(Channel::of(world)->world->depth) { ++depth_; }
NestedAttempt::~NestedAttempt() { --depth_; }

std::vector<Outcome> agree(const Communicator& communicator, const Outcome& mine, std::chrono::milliseconds limit) {
  auto& world = *Channel::of(communicator)->world;
  if (world.outer) {
    if (world.depth > world.outer->depth) throw *root_cause(world.outer->outcomes, world.placement.hosts);
    world.has_outer = false;
    return std::exchange(world.outer, std::nullopt)->outcomes;
  }
  auto all = exchange_outcomes(communicator, world, mine, limit);
  auto outcomes = with_depth_mismatch(std::move(all.of_rank), all.depths);
  world.alarm.clear(all.raised);
  ++world.agreements;
  if (std::ranges::any_of(outcomes, [](const Outcome& o) { return o.kind != Outcome::Kind::done; })) {
    ++world.failures;
    Channel::release_idle();
    Channel::of(communicator)->renew();
  }
  if (const int outermost = std::ranges::min(all.depths); outermost < world.depth) {
    world.outer = {outermost, std::move(outcomes)};
    world.has_outer = true;
    throw *root_cause(world.outer->outcomes, world.placement.hosts);
  }
  return outcomes;
}

}  // namespace muster::detail::comm
