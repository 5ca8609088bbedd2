#include "comm/agreement.hpp"

#include "base/text.hpp"
#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/progress.hpp"
#include "comm/wait.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace muster::detail::comm {
namespace {

/// The outcomes of all ranks, and the nesting depth of the attempt that each rank came from.
struct Outcomes {
  std::vector<Outcome> of_rank;
  std::vector<bool> raised;  ///< [rank]: true if it has raised an alarm
  std::vector<int> depths;   ///< [rank]: how deep its attempt is nested
};

/// Gives the outcomes of all ranks of a world to each of them, in ⌈log₂ p⌉ rounds. In round k each rank sends the
/// outcomes of itself and the ranks after it, 2^k in all (fewer in the last round), to the rank 2^k before it (Bruck et
/// al., Efficient algorithms for all-to-all communications in multiport message-passing systems, 1997).
class OutcomeExchange {
 public:
  OutcomeExchange(World& world, int rank, const Outcome& mine)
      : world_(world), rank_(static_cast<std::size_t>(rank)), size_(world.members.size()) {
    // If this rank has raised an alarm, its outcome stays the raised one: other ranks may have failed because of it.
    const auto raised = world_.alarm.raised();
    std::string own{static_cast<char>(raised.has_value()), static_cast<char>(world_.depth)};
    own += pack(raised.value_or(mine), longest - fields - packed_fields);
    known_.push_back(std::move(own));
  }

  OutcomeExchange(const OutcomeExchange&) = delete;
  OutcomeExchange& operator=(const OutcomeExchange&) = delete;
  /// MPI may still use the memory if this rank has given up waiting.
  ~OutcomeExchange() {
    if (!finished_) world_.agreement->abandon({memory_->receive}, memory_->sends, memory_);
  }

  /// Advances. True if this rank has the outcomes of all ranks, and its own messages are sent.
  bool advance() {
    while (!has_all() && advance_round()) continue;
    const bool sent = test_all(memory_->sends);
    return finished_ = has_all() && sent;
  }

  /// True if this rank has the outcomes of all ranks.
  bool has_all() const { return known_.size() == size_; }
  /// The ranks whose outcome this rank does not have.
  std::vector<int> without_outcome() const {
    std::vector<int> ranks;
    for (std::size_t distance = known_.size(); distance < size_; ++distance) ranks.push_back(rank_at(distance));
    std::ranges::sort(ranks);
    return ranks;
  }
  /// The ranks of without_outcome() that have not come to agree(), as far as this rank knows.
  std::vector<int> missing() const {
    auto ranks = without_outcome();
    std::erase_if(ranks, [&](int r) { return world_.presence.has_answered(r, world_.agreements + 1); });
    return ranks;
  }

  /// Call it when has_all().
  Outcomes take() const {
    Outcomes all{std::vector<Outcome>(size_), std::vector<bool>(size_), std::vector<int>(size_)};
    for (std::size_t distance = 0; distance < size_; ++distance) {
      const std::string_view bytes = known_[distance];
      const auto r = static_cast<std::size_t>(rank_at(distance));
      all.raised[r] = bytes[0] != 0;
      all.depths[r] = bytes[1];
      all.of_rank[r] = unpack(bytes.substr(fields));
    }
    return all;
  }

 private:
  static constexpr std::size_t longest = 8 * 1024;  ///< bytes of an outcome
  static constexpr std::size_t fields = 2;          ///< bytes before the packed outcome: alarm raised, depth
  static constexpr int tag = 0;

  /// The memory that MPI uses.
  struct Memory {
    std::deque<std::string> sent;  ///< a deque, since it never moves its elements
    std::vector<MPI_Request> sends;
    std::string received;
    MPI_Request receive = MPI_REQUEST_NULL;
  };

  /// The rank at this distance after this one; rank 0 comes after the last rank.
  int rank_at(std::size_t distance) const { return static_cast<int>((rank_ + distance) % size_); }

  /// Advances the round that this rank is in. True if it has ended. Each rank sends once to a given rank in an
  /// agreement, and MPI keeps the order of messages, so a message never belongs to another agreement.
  bool advance_round() {
    const auto distance = known_.size();
    const auto count = std::min(distance, size_ - distance);
    if (distance != begun_round_) {
      begun_round_ = distance;
      send(rank_at(size_ - distance), count);
    }
    const int from = rank_at(distance);
    int flag = 0;
    MPI_Status status;
    if (memory_->receive == MPI_REQUEST_NULL) {
      check(MPI_Iprobe(from, tag, world_.agreement, &flag, &status), "MPI_Iprobe");
      if (!flag) return false;
      int bytes = 0;
      check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      memory_->received.resize(static_cast<std::size_t>(bytes));
      check(MPI_Irecv(memory_->received.data(), bytes, MPI_BYTE, from, tag, world_.agreement, &memory_->receive),
            "MPI_Irecv");
    }
    bool received = false;
    check(test(memory_->receive, received), "MPI_Test");
    if (!received) return false;
    std::string_view rest = memory_->received;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t bytes = 0;
      std::memcpy(&bytes, rest.data(), sizeof bytes);
      known_.emplace_back(rest.substr(sizeof bytes, bytes));
      rest.remove_prefix(sizeof bytes + bytes);
    }
    return true;
  }

  /// Sends the first `count` known outcomes, each after its length.
  void send(int to, std::size_t count) {
    auto& message = memory_->sent.emplace_back();
    for (std::size_t i = 0; i < count; ++i) {
      const auto bytes = static_cast<std::uint32_t>(known_[i].size());
      message.append(reinterpret_cast<const char*>(&bytes), sizeof bytes).append(known_[i]);
    }
    memory_->sends.push_back(
        world_.agreement->send(message.data(), static_cast<int>(message.size()), MPI_BYTE, to, tag));
  }

  World& world_;
  const std::size_t rank_;
  const std::size_t size_;
  std::vector<std::string> known_;  ///< [distance]: packed outcomes of this rank and the ranks after it
  std::size_t begun_round_ = 0;     ///< `distance` of the round whose message was sent
  const std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  bool finished_ = false;
};

/// Returns the outcomes. If all ranks are done but at different nesting depths, every outcome becomes the error that
/// says so.
std::vector<Outcome> with_depth_mismatch(std::vector<Outcome> outcomes, const std::vector<int>& depths) {
  const auto least = std::ranges::min_element(depths), most = std::ranges::max_element(depths);  // the lowest ranks
  const bool all_done = std::ranges::all_of(outcomes, [](const Outcome& o) { return o.kind == Outcome::Kind::done; });
  if (*least == *most || !all_done) return outcomes;
  const Error mismatch(
      ExitCode::user_error, "waiting for all ranks",
      str("rank ", most - depths.begin(), " is in a call that rank ", least - depths.begin(), " does not make"),
      "Make collective calls on all ranks alike");
  for (auto& outcome : outcomes) outcome = {Outcome::Kind::failed, mismatch.code(), /*agreed=*/true, mismatch.what()};
  return outcomes;
}

/// The error that `missing` ranks did not come. `stalled`: the rank that has waited too long, if there is one.
RanksMissing ranks_missing(const World& world, int rank, const std::vector<int>& missing, std::optional<int> stalled,
                           std::chrono::nanoseconds waited, const WaitMonitor::Decision& decision) {
  using namespace std::chrono_literals;
  int lowest_here = 0;
  std::string names;
  for (const int r : missing) {
    if (r == lowest_here) ++lowest_here;
    names += str(names.empty() ? "" : ", ", r, " (", world.placement.hosts[static_cast<std::size_t>(r)], ")");
  }
  // The rank that waited too long reports first, as it knows most; without one, the lowest rank that came.
  const bool first = stalled.value_or(lowest_here) == rank;
  const auto seconds = std::chrono::round<std::chrono::seconds>(waited).count();
  return {
      Error(ExitCode::retry, "waiting for all ranks to agree",
            str("no word within ", seconds, " s from rank ", names, decision.fact.empty() ? "" : ": " + decision.fact),
            "It is stuck or lost; start the job again" + decision.details),
      first ? 0ms : 2000ms};
}

/// Exchanges outcomes with all ranks. Throws RanksMissing as agree() does.
Outcomes exchange_outcomes(const Communicator& communicator, World& world, const Outcome& mine,
                           std::chrono::milliseconds timeout) {
  OutcomeExchange exchange(world, communicator.rank(), mine);
  const auto number = static_cast<std::uint64_t>(world.agreements + 1);
  auto& calls = world.wait_monitor.own_record().calls;
  const auto ticket =
      calls.begin(0, number, {.kind = node::Call::Kind::end, .root = static_cast<int>(mine.kind)}, nullptr);
  const WaitedFor end{0, number, Channel::of(communicator)->world_ranks};
  const auto begun = watch::now();
  WaitTime time;
  std::optional<std::chrono::nanoseconds> given_up;  // when this rank learnt that a rank has waited too long
  bool has_asked = false;
  const auto received_or_given_up = [&] {
    time.until();
    require_in_use(world);
    if (exchange.advance()) return true;
    // Other ranks may still need this rank's part in operations that it has started and does not wait for.
    if (mine.kind == Outcome::Kind::done) Channel::advance_all();
    world.alarm.poll();
    world.presence.poll(world.agreements + 1);
    if (!given_up && world.alarm.stalled()) given_up = watch::now();
    // The outcome of a rank that has come may wait at a rank that has not come.
    if (!has_asked && (given_up || watch::now() - begun > timeout / 2)) {
      world.presence.ask(exchange.missing(), world.agreements + 1);
      has_asked = true;
    }
    return given_up && watch::now() > *given_up + stall_grace;
  };
  WaitMonitor::Decision decision;
  for (auto more = std::max(timeout, timeout / 2 + stall_grace);
       more.count() > 0 && !wait_until(received_or_given_up, more);) {
    const auto late = exchange.missing();
    decision = world.wait_monitor.decide(end, begun, time.suspended(), timeout, &late);
    more = decision.more;
  }
  // If the last rank has come only now, its outcome is still on its way.
  if (exchange.missing().empty()) wait_until([&] { return exchange.advance() || exchange.has_all(); }, stall_grace);
  if (!exchange.has_all()) {
    const auto missing = exchange.missing();
    throw ranks_missing(world, communicator.rank(), missing.empty() ? exchange.without_outcome() : missing,
                        given_up ? world.alarm.stalled() : std::nullopt, watch::now() - begun, decision);
  }
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
  auto& world = *Channel::of(communicator)->world;
  require_in_use(world);
  world.alarm.throw_if_raised();
}

void raise_alarm(const Communicator& communicator, const Outcome& mine) {
  auto& world = *Channel::of(communicator)->world;
  if (is_forked()) return;
  // All ranks already know the error that an outer attempt has agreed on (`outer`).
  if (mine.kind == Outcome::Kind::failed && !world.outer) world.alarm.raise(mine);
}

void give_up_work(const Communicator& world) noexcept { Channel::of(world)->world->use = World::Use::given_up; }

void leave_thread_behind(const Communicator& world) noexcept {
  Channel::of(world)->world->use = World::Use::left_behind;
}

void stay_if_left_behind(const Communicator& communicator) {
  const auto& world = *Channel::of(communicator)->world;
  if (world.use == World::Use::left_behind) require_in_use(world);
}

NestedAttempt::NestedAttempt(const Communicator& world) : depth_(Channel::of(world)->world->depth) { ++depth_; }
NestedAttempt::~NestedAttempt() { --depth_; }

std::vector<Outcome> agree(const Communicator& communicator, const Outcome& mine, std::chrono::milliseconds timeout) {
  auto& world = *Channel::of(communicator)->world;
  require_in_use(world);
  if (world.outer) {
    if (world.depth > world.outer->depth) throw *root_cause(world.outer->outcomes, world.placement.hosts);
    world.has_outer = false;
    return std::exchange(world.outer, std::nullopt)->outcomes;
  }
  auto all = exchange_outcomes(communicator, world, mine, timeout);
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
