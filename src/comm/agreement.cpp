#include "comm/agreement.hpp"

#include "comm/channel.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"

#include <algorithm>
#include <memory>
#include <ranges>
#include <string>
#include <string_view>

namespace muster::detail::comm {
namespace {

/// Cuts `text` to at most `longest` bytes and marks the cut.
std::string shortened(const std::string& text, std::size_t longest) {
  constexpr std::string_view mark = " […]";
  if (text.size() <= longest) return text;
  const auto room = text.substr(0, longest - std::min(longest, mark.size()));
  auto end = room.rfind(". ");
  end = end == std::string::npos ? room.rfind(' ') : end + 1;
  return room.substr(0, end).append(mark);
}

constexpr const char* stuck_or_lost = "It is stuck or lost; start the job again";

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

}  // namespace

Outcome current_outcome() {
  try {
    throw;
  } catch (const RemoteError& error) {
    return {Outcome::Kind::interrupted, error.code(), false, error.what()};
  } catch (const WaitTimeout& error) {
    return {Outcome::Kind::failed, error.code(), false, error.what(), true};
  } catch (const Error& error) {
    return {Outcome::Kind::failed, error.code(), error.agreed(), error.what()};
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    return {Outcome::Kind::failed, ExitCode::user_error, false,
            std::string(text.substr(0, text.find("\nException raised from ")))};
  } catch (...) {
    return {Outcome::Kind::failed, ExitCode::user_error, false, "an exception that is not a std::exception"};
  }
}

std::string pack(const Outcome& outcome, std::size_t longest) {
  std::string bytes{static_cast<char>(outcome.kind), static_cast<char>(outcome.code),
                    static_cast<char>(outcome.agreed | outcome.stalled << 1)};
  return bytes.append(shortened(outcome.text, longest));
}

Outcome unpack(std::string_view bytes) {
  return {static_cast<Outcome::Kind>(bytes[0]), static_cast<ExitCode>(static_cast<unsigned char>(bytes[1])),
          (bytes[2] & 1) != 0, std::string(bytes.substr(packed_fields)), (bytes[2] & 2) != 0};
}

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

void throw_outer_cause(const World& world) {
  const auto& outcomes = world.outer->outcomes;
  const auto cause = root_cause(outcomes, world.placement.hosts);
  auto first = std::ranges::find(outcomes, Outcome::Kind::failed, &Outcome::kind);
  if (first == outcomes.end()) first = std::ranges::find(outcomes, Outcome::Kind::interrupted, &Outcome::kind);
  throw RemoteError(cause->code(), static_cast<int>(first - outcomes.begin()), cause->what());
}

std::vector<Outcome> agree(const Communicator& world, const Outcome& mine, std::chrono::milliseconds limit) {
  auto& shared = *Channel::of(world)->world;
  if (shared.outer) {
    if (shared.depth > shared.outer->depth) throw *root_cause(shared.outer->outcomes, shared.placement.hosts);
    shared.has_outer = false;
    return std::exchange(shared.outer, std::nullopt)->outcomes;
  }
  const MPI_Comm comm = shared.agreement;
  const auto n = static_cast<std::size_t>(world.size());
  const auto rank = static_cast<std::size_t>(world.rank());
  constexpr std::size_t longest = 8 * 1024;

  // Everything that MPI may still use after a timeout.
  struct Memory {
    std::string mine;
    std::vector<std::string> theirs;
    std::vector<MPI_Request> receives, sends;
    std::vector<int> lengths;
  };
  const auto memory = std::make_shared<Memory>();
  // What this rank has raised stays its outcome: other ranks may have left because of it.
  const auto raised_here = shared.alarm.raised();
  memory->mine = {static_cast<char>(raised_here.has_value()), static_cast<char>(shared.depth)};
  memory->mine += pack(raised_here.value_or(mine), longest - memory->mine.size() - packed_fields);
  memory->theirs.resize(n);
  memory->receives.assign(n, MPI_REQUEST_NULL);
  memory->sends.assign(n, MPI_REQUEST_NULL);
  memory->lengths.assign(n, -1);
  for (std::size_t r = 0; r < n; ++r) {
    if (r == rank) continue;
    memory->theirs[r].resize(longest);
    check(MPI_Irecv(memory->theirs[r].data(), static_cast<int>(longest), MPI_BYTE, static_cast<int>(r), 0, comm,
                    &memory->receives[r]),
          "MPI_Irecv");
    check(MPI_Isend(memory->mine.data(), static_cast<int>(memory->mine.size()), MPI_BYTE, static_cast<int>(r), 0, comm,
                    &memory->sends[r]),
          "MPI_Isend");
  }

  const auto all_received = [&] {
    bool all = true;
    for (std::size_t r = 0; r < n; ++r) {
      if (r == rank || memory->lengths[r] >= 0) continue;
      int flag = 0;
      MPI_Status status;
      check(MPI_Test(&memory->receives[r], &flag, &status), "MPI_Test");
      if (flag) check(MPI_Get_count(&status, MPI_BYTE, &memory->lengths[r]), "MPI_Get_count");
      all = all && flag;
    }
    int sent = 0;
    check(MPI_Testall(static_cast<int>(n), memory->sends.data(), &sent, MPI_STATUSES_IGNORE), "MPI_Testall");
    return all && sent;
  };
  const auto missing = [&] {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < n; ++r)
      if (r != rank && memory->lengths[r] < 0) ranks.push_back(static_cast<int>(r));
    return ranks;
  };
  const auto attempt = shared.agreements + 1;
  auto& calls = shared.wait_monitor.own_record().calls;
  const auto ticket = calls.begin(0, static_cast<std::uint64_t>(attempt),
                                  {.kind = node::Call::Kind::end, .root = static_cast<int>(mine.kind)}, nullptr);
  const WaitedFor end{0, static_cast<std::uint64_t>(attempt), Channel::of(world)->world_ranks};
  const auto begun = watch::now();
  std::optional<std::chrono::nanoseconds> given_up;  // when this rank learnt that some rank has waited too long
  const auto received_or_given_up = [&] {
    if (all_received()) return true;
    // Other ranks may still need this rank's part in operations that it has started and does not wait for.
    if (mine.kind == Outcome::Kind::done) Channel::advance_all();
    shared.alarm.poll();
    if (!given_up && shared.alarm.stalled()) given_up = watch::now();
    return given_up && watch::now() > *given_up + stall_grace;
  };
  WaitMonitor::Decision decision;
  for (auto more = limit; more.count() > 0 && !wait_until(received_or_given_up, more);) {
    const auto late = missing();
    decision = shared.wait_monitor.decide(end, begun, limit, &late);
    more = decision.more;
  }
  if (const auto ranks = missing(); !ranks.empty()) {
    const auto lowest = static_cast<std::size_t>(std::ranges::mismatch(ranks, std::views::iota(0)).in1 - ranks.begin());
    std::string names;
    for (const int r : ranks)
      names += (names.empty() ? "" : ", ") + std::to_string(r) + " (" +
               shared.placement.hosts[static_cast<std::size_t>(r)] + ")";
    shared.agreement->abandon(memory->receives, memory->sends, memory);
    // The rank that waited too long reports first, as it knows most; without one, the lowest rank that came.
    using namespace std::chrono_literals;
    const bool first = given_up ? shared.alarm.stalled() == world.rank() : lowest == rank;
    const auto report_delay = first ? 0ms : 2000ms;
    const auto waited = std::chrono::round<std::chrono::seconds>(watch::now() - begun);
    throw RanksMissing(Error(ExitCode::retry, "waiting for all ranks to agree",
                             "no word within " + std::to_string(waited.count()) + " s from rank " + names +
                                 (decision.fact.empty() ? "" : ": " + decision.fact),
                             std::string(stuck_or_lost) + decision.details),
                       report_delay);
  }
  calls.end(ticket);

  std::vector<Outcome> outcomes(n);
  std::vector<bool> raised(n);
  std::vector<int> depths(n);
  for (std::size_t r = 0; r < n; ++r) {
    const auto bytes =
        r == rank ? std::string_view(memory->mine)
                  : std::string_view(memory->theirs[r]).substr(0, static_cast<std::size_t>(memory->lengths[r]));
    raised[r] = bytes.front() != 0;
    depths[r] = bytes[1];
    outcomes[r] = unpack(bytes.substr(2));
  }
  outcomes = with_depth_mismatch(std::move(outcomes), depths);
  shared.alarm.clear(raised);
  ++shared.agreements;
  if (std::ranges::any_of(outcomes, [](const Outcome& o) { return o.kind != Outcome::Kind::done; })) {
    ++shared.failures;
    Channel::release_idle();
    Channel::of(world)->renew();
  }
  if (const int outermost = std::ranges::min(depths); outermost < shared.depth) {
    shared.outer = {outermost, std::move(outcomes)};
    shared.has_outer = true;
    throw *root_cause(shared.outer->outcomes, shared.placement.hosts);
  }
  return outcomes;
}

std::optional<Error> root_cause(const std::vector<Outcome>& outcomes, const std::vector<std::string>& hosts) {
  // A rank leaves only because another has failed, so a rank that has left means an error even if no rank has failed.
  auto first = std::ranges::find(outcomes, Outcome::Kind::failed, &Outcome::kind);
  if (first == outcomes.end()) first = std::ranges::find(outcomes, Outcome::Kind::interrupted, &Outcome::kind);
  if (first == outcomes.end()) return std::nullopt;
  const bool alike = std::ranges::all_of(
      outcomes, [&](const Outcome& o) { return o.kind == Outcome::Kind::failed && o.text == first->text; });
  if (first->agreed || alike) return Error(first->code, first->text);
  const auto rank = first - outcomes.begin();
  return Error(first->code,
               "rank " + std::to_string(rank) + " (" + hosts[static_cast<std::size_t>(rank)] + "): " + first->text);
}

}  // namespace muster::detail::comm
