#include "comm/wait_monitor.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/supervisor_message.hpp"
#include "base/thread.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "comm/mpi_threads.hpp"
#include "muster/json.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <iterator>
#include <map>
#include <ranges>
#include <set>
#include <utility>

namespace muster::detail::comm {
namespace {

using namespace std::chrono_literals;
using watch::Call;
using watch::Record;

constexpr int question_tag = 1, answer_tag = 2;
/// How long a rank waits for another rank's stack, and for the answers of other nodes, which themselves wait for
/// stacks.
constexpr auto stack_timeout = 250ms, answer_timeout = 500ms;
/// How often the thread polls for questions from other nodes.
constexpr auto poll_interval = 50ms;
/// How many ranks of each other node are asked, at most.
constexpr std::size_t asked_ranks = 4;
/// Limits for the message on the terminal (ranks, frames) and for the log (calls).
constexpr std::size_t shown_ranks = 3, shown_frames = 7, kept_calls = 16;

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen,
                std::optional<std::chrono::milliseconds> timeout) {
  timespec time{};
  if (timeout) time = {timeout->count() / 1000, timeout->count() % 1000 * 1'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, timeout ? &time : nullptr, nullptr, 0);
}
void futex_wake(std::atomic<std::uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string seconds(std::chrono::nanoseconds time) {
  return formatted("%.1f s", std::chrono::duration<double>(time).count());
}

std::string indented(const std::string& lines) {
  std::string text = "\n  ";
  for (const char c : lines) text += c == '\n' ? std::string("\n  ") : std::string(1, c);
  return text;
}

/// True if two ranks that make these calls are in the same collective. In an all-to-all the counts may differ between
/// ranks, and at the end of an attempt the outcomes.
bool is_same_call(const Call& one, const Call& other) {
  if (one.kind != other.kind) return false;
  return one.kind == Call::Kind::all_to_all || one.kind == Call::Kind::end || one.encode() == other.encode();
}

std::string nth_call(const std::string& text, std::uint64_t call_number) {
  return text + " as its " + node::nth(call_number);
}

std::string first_lines(const std::string& lines, std::size_t most) {
  std::size_t end = 0;
  for (; most > 0; --most) {
    end = lines.find('\n', end);
    if (end == std::string::npos) return lines;
    ++end;
  }
  return lines.substr(0, end) + "…";
}

}  // namespace

/// What one rank is doing.
struct WaitMonitor::Finding {
  int rank = 0;
  bool late = false;     ///< the rank has not come to the call
  bool stopped = false;  ///< the process is stopped or dead
  bool silent = false;   ///< nobody on its node has answered; found by the asking rank, so not packed
  std::int64_t busy_ms = 0;
  std::string where = {}, calls = {}, stack = {};
  std::uint64_t word = 0;  ///< Call::encode() of the call that it has begun with this call number; 0 if unknown
  std::string text = {};   ///< that call in words

  Json pack() const { return {rank, late, stopped, busy_ms, where, calls, stack, word, text}; }
  static Finding unpack(const Json& f) {
    return {.rank = f[0],
            .late = f[1],
            .stopped = f[2],
            .busy_ms = f[3],
            .where = f[4],
            .calls = f[5],
            .stack = f[6],
            .word = f[7],
            .text = f[8]};
  }
};

WaitMonitor::WaitMonitor(PooledCommunicator comm, const Placement& placement)
    : comm_(std::move(comm)), rank_(rank_in(comm_)), placement_(placement), records_(placement.node_of_rank.size()) {
  const auto size = records_.size();
  const auto own = static_cast<std::size_t>(rank_);
  const auto stride = node::whole_pages(sizeof(Record));
  std::vector<int> here;
  for (std::size_t r = 0; r < size; ++r)
    if (placement_.node_of_rank[r] == placement_.node_of_rank[own]) here.push_back(static_cast<int>(r));
  std::shared_ptr<node::SharedSegment> segment;
  const std::set<int> nodes(placement_.node_of_rank.begin(), placement_.node_of_rank.end());
  if (nodes.size() < size) {
    const auto local = static_cast<std::size_t>(std::ranges::find(here, rank_) - here.begin());
    segment = map_node_segment(*comm_, here, stride * here.size(), stride * local, stride);
  }
  shares_memory_ = nodes.size() == size || segment != nullptr;
  if (segment) {
    for (std::size_t i = 0; i < here.size(); ++i)
      records_[static_cast<std::size_t>(here[i])] = reinterpret_cast<Record*>(segment->data() + i * stride);
    memory_ = segment;
  } else {
    auto alone = std::make_shared<Record>();
    records_[own] = alone.get();
    memory_ = std::move(alone);
  }
  auto& mine = *records_[own];
  mine.started = watch::start_time_of(::getpid());
  mine.process = ::getpid();
}

WaitMonitor::~WaitMonitor() { end_answering(); }

// The thread that answers questions about this rank.

void WaitMonitor::start_answering() {
  if (thread_.joinable()) return;
  stack_.emplace();
  ending_ = false;
  own_record().is_answering = true;
  thread_ = start_thread("muster-watch", [this] { run(); });
}

void WaitMonitor::end_answering() {
  if (!thread_.joinable()) return;
  ending_ = true;
  own_record().is_answering = false;
  ++own_record().stack_requests;
  futex_wake(own_record().stack_requests);
  thread_.join();
  stack_.reset();
}

bool WaitMonitor::thread_answers() const noexcept {
  return records_[static_cast<std::size_t>(rank_)]->is_answering && threads_may_call_mpi();
}

void WaitMonitor::answer_in_wait() {
  if (!has_remote_ranks() || thread_answers()) return;
  if (const std::unique_lock lock(asking_, std::try_to_lock); lock) answer_questions();
}

void WaitMonitor::run() {
  auto& mine = own_record();
  const bool serves = has_remote_ranks() && threads_may_call_mpi();
  while (!ending_) {
    const auto asked = mine.stack_requests.load();
    if (asked != mine.stack_replies.load()) {
      try {
        mine.stack.write(stack_->take());
      } catch (const std::exception& error) {  // for example out of memory
        mine.stack.write(error.what());
      }
      mine.stack_replies = asked;
      futex_wake(mine.stack_replies);
    }
    if (serves) answer_questions();
    std::optional<std::chrono::milliseconds> timeout;
    if (serves) timeout = poll_interval;
    if (!ending_) futex_wait(mine.stack_requests, asked, timeout);
  }
}

/// Answers the questions that have come from ranks of other nodes.
void WaitMonitor::answer_questions() try {
  while (const auto letter = receive_letter(comm_, MPI_ANY_SOURCE, question_tag)) {
    const auto question = json_from_cbor(letter->bytes);
    const std::vector<int> ranks = question[3], late = question[4];
    const WaitedFor call{question[1], question[2], ranks};
    auto findings = inspect_node(call, ranks, question[5].get<bool>() ? &late : nullptr);
    add_stacks(findings);
    Json answer{question[0], Json::array()};
    for (const auto& finding : findings) answer[1].push_back(finding.pack());
    comm_->post(json_to_cbor(answer), letter->from, answer_tag);
  }
} catch (const std::exception& error) {
  log::debug(str("answering another node: ", error.what()));
}

// What the ranks of a call are doing.

std::string WaitMonitor::at_step(const Record& record) {
  const auto step = record.step.load();
  return step == 0 ? "" : str(", in step ", step, " of epoch ", record.epoch);
}

std::string WaitMonitor::where(const Record& record) const {
  const auto last = record.calls.last(1);
  std::string text;
  if (const auto state = watch::state_of(record.process, record.started); !state.empty()) text = state + "; ";
  if (last.empty())
    text += "it has made no call yet";
  else if (last[0].ended == 0ns)
    text += "it is in " + last[0].text() + " since " + seconds(watch::now() - last[0].begun);
  else
    text += "it has made no call for " + seconds(watch::now() - last[0].ended) + ", since " + last[0].text();
  return text + at_step(record);
}

/// Inspects the ranks of this node among `ranks`.
std::vector<WaitMonitor::Finding> WaitMonitor::inspect_node(const WaitedFor& call, const std::vector<int>& ranks,
                                                            const std::vector<int>* late) {
  std::vector<Finding> findings;
  for (const int r : ranks) {
    const auto* const record = records_[static_cast<std::size_t>(r)];
    if (record == nullptr) continue;
    Finding finding{.rank = r};
    const auto calls = record->calls.last(kept_calls);
    const auto come = call.call_number > 0 ? record->calls.find(call.channel, call.call_number) : std::nullopt;
    finding.late = late != nullptr ? std::ranges::count(*late, r) > 0
                                   : record->call_counts.begun(call.channel).value_or(0) < call.call_number && !come;
    if (come) finding.word = come->call.encode(), finding.text = nth_call(come->text(), call.call_number);
    finding.stopped = !watch::state_of(record->process, record->started).empty();
    finding.busy_ms = (record->busy_until.load() - watch::now().count()) / 1'000'000;
    finding.where = where(*record);
    for (const auto& entry : calls) {
      finding.calls += (finding.calls.empty() ? "" : "\n") + seconds(watch::now() - entry.begun) + " ago";
      if (entry.call_number > 0) finding.calls += ", the " + node::nth(entry.call_number) + " of its communicator";
      finding.calls += ": " + entry.text() + (entry.ended == 0ns ? ", under way" : "");
    }
    findings.push_back(std::move(finding));
  }
  return findings;
}

/// Adds the stacks of this node's late or stopped ranks: of this rank, and of at most shown_ranks others.
void WaitMonitor::add_stacks(std::span<Finding> findings) {
  std::vector<std::pair<Finding*, std::uint32_t>> asked;
  for (auto& finding : findings) {
    auto& record = *records_[static_cast<std::size_t>(finding.rank)];
    if (!finding.late && !finding.stopped) continue;
    if (!record.is_answering || asked.size() >= shown_ranks) continue;
    if (finding.rank == rank_) {  // possible only on the thread that answers other nodes
      if (std::this_thread::get_id() == thread_.get_id()) finding.stack = stack_->take();
      continue;
    }
    asked.emplace_back(&finding, record.stack_requests.fetch_add(1) + 1);
    futex_wake(record.stack_requests);
  }
  const auto end = std::chrono::steady_clock::now() + stack_timeout;
  for (auto& [finding, number] : asked) {
    auto& record = *records_[static_cast<std::size_t>(finding->rank)];
    for (;;) {
      const auto answered = record.stack_replies.load();
      if (static_cast<std::int32_t>(answered - number) >= 0) {
        finding->stack = record.stack.read();
        break;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
      if (left <= 0ms) break;
      futex_wait(record.stack_replies, answered, left);
    }
  }
}

/// Asks some ranks of each other node, each of which answers for all ranks of its node: without a thread, a rank that
/// is late itself does not answer.
std::vector<WaitMonitor::Finding> WaitMonitor::ask_other_nodes(const WaitedFor& call, const std::vector<int>* late) {
  const std::lock_guard lock(asking_);
  std::map<int, std::vector<int>> of_node;
  for (const int r : call.ranks)
    if (records_[static_cast<std::size_t>(r)] == nullptr)
      // If the ranks of a node share no memory, each answers for itself.
      of_node[shares_memory_ ? placement_.node_of_rank[static_cast<std::size_t>(r)] : -1 - r].push_back(r);
  const auto number = ++questions_;
  for (const auto& [unused, ranks] : of_node) {
    const auto question = json_to_cbor(
        Json{number, call.channel, call.call_number, ranks, late ? *late : std::vector<int>(), late != nullptr});
    for (const int r : ranks | std::views::take(asked_ranks)) comm_->post(question, r, question_tag);
  }
  std::vector<Finding> findings;
  auto left = of_node.size();
  const auto end = std::chrono::steady_clock::now() + answer_timeout;
  while (left > 0 && std::chrono::steady_clock::now() < end) {
    const auto letter = receive_letter(comm_, MPI_ANY_SOURCE, answer_tag);
    if (!letter) {
      if (!thread_answers()) answer_questions();  // another rank may have waited as long, and ask
      std::this_thread::sleep_for(1ms);
      continue;
    }
    const auto answer = json_from_cbor(letter->bytes);
    if (answer[0] != number) continue;  // an answer to an earlier question
    const int first = Finding::unpack(answer[1].at(0)).rank;
    if (std::ranges::find(findings, first, &Finding::rank) != findings.end()) continue;  // its node has answered
    --left;
    for (const auto& finding : answer[1]) findings.push_back(Finding::unpack(finding));
  }
  for (const auto& [unused, ranks] : of_node) {
    if (std::ranges::find(findings, ranks.front(), &Finding::rank) != findings.end()) continue;
    tell(message_silent, host(ranks.front()));
    for (const int r : ranks)
      findings.push_back({.rank = r,
                          .late = late != nullptr && std::ranges::count(*late, r) > 0,
                          .silent = true,
                          .where = "nobody there answers"});
  }
  return findings;
}

WaitMonitor::Decision WaitMonitor::decide(const WaitedFor& call, std::chrono::nanoseconds begun,
                                          std::chrono::nanoseconds suspended, std::chrono::milliseconds timeout,
                                          const std::vector<int>* late) {
  constexpr auto announced = "The late ranks have announced work that takes longer";
  auto findings = inspect_node(call, call.ranks, late);
  const auto more = [&](std::span<const Finding> of) {
    auto longest = 0ms;
    for (const auto& finding : of) {
      if (finding.silent || (call.call_number > 0 && !finding.late)) continue;
      const std::chrono::milliseconds busy(finding.busy_ms);
      if (watch::now() + busy > begun)
        longest = std::max(longest, std::chrono::ceil<std::chrono::milliseconds>(busy + suspended + timeout));
    }
    return longest;
  };
  const auto here = static_cast<std::ptrdiff_t>(findings.size());
  if (const auto longer = more(findings); longer > 0ms) return {.more = longer, .fact = announced, .details = {}};
  if (has_remote_ranks()) std::ranges::move(ask_other_nodes(call, late), std::back_inserter(findings));
  if (const auto longer = more(std::span(findings).subspan(static_cast<std::size_t>(here))); longer > 0ms)
    return {.more = longer, .fact = announced, .details = {}};
  const auto mine = std::ranges::find(findings, rank_, &Finding::rank);
  for (const auto& theirs : findings)
    if (mine->word != 0 && theirs.word != 0 && !is_same_call(Call::decode(mine->word), Call::decode(theirs.word)))
      throw_mismatch(mine->text, theirs.rank, theirs.text);
  add_stacks(std::span(findings).first(static_cast<std::size_t>(here)));

  Decision decision;
  // Ranks that do not answer may have come or not. If other ranks are known to be late, the late ranks are the cause.
  const bool any_late = std::ranges::any_of(findings, &Finding::late);
  std::size_t shown = 0, all = 0;
  std::string seen;
  for (const auto& finding : findings) {
    const auto name = str("rank ", finding.rank, " (", host(finding.rank), ")");
    seen += "\n" + name + (finding.late ? ", which has not come: " : ": ") + finding.where + indented(finding.calls);
    if (!finding.stack.empty()) seen += "\nIt stands in" + indented(finding.stack);
    if (any_late ? !finding.late : !finding.stopped && !finding.silent) continue;
    if (++all > shown_ranks) continue;
    ++shown;
    decision.fact += (decision.fact.empty() ? "" : "; ") + name +
                     (finding.silent ? " does not answer: "
                      : finding.late ? " has not come: "
                                     : " has come and ") +
                     finding.where;
    if (!finding.stack.empty())
      decision.details +=
          str("\nRank ", finding.rank, " stands in", indented(first_lines(finding.stack, shown_frames)));
  }
  if (all > shown) decision.fact += str("; and ", all - shown, " more");
  if (decision.fact.empty())
    decision.fact = call.call_number > 0 ? "all ranks have come, but the call does not finish"
                                         : "no rank that may send is stopped or gone";
  log::write_to_file_only("what the ranks do, as this one sees it:" + seen);
  // This rank gives up now, but ranks that began to wait a little later still ask: answer them for a while.
  for (const auto end = std::chrono::steady_clock::now() + answer_timeout;
       has_remote_ranks() && !thread_answers() && std::chrono::steady_clock::now() < end;
       std::this_thread::sleep_for(1ms))
    answer_in_wait();
  return decision;
}

void WaitMonitor::compare(const WaitedFor& call, std::int64_t attempt) const {
  const auto& own_record = *records_[static_cast<std::size_t>(rank_)];
  const auto own_calls = own_record.calls.last();
  const auto is_it = [&](const watch::CallEntry& e) {
    return e.channel == call.channel && e.call_number == call.call_number;
  };
  const auto mine = std::ranges::find_if(own_calls, is_it);
  if (mine == own_calls.end()) return;
  const auto in = [](const watch::CallEntry& entry) { return nth_call(entry.text(), entry.call_number); };
  for (const int r : call.ranks) {
    const auto* const record = records_[static_cast<std::size_t>(r)];
    if (record == nullptr || r == rank_) continue;
    const auto calls = record->calls.last();
    if (const auto theirs = std::ranges::find_if(calls, is_it); theirs != calls.end()) {
      if (is_same_call(mine->call, theirs->call)) continue;
      throw_mismatch(in(*mine), r, in(*theirs));
    }
    const auto begun = record->call_counts.begun(call.channel);
    if (calls.empty() || !begun || *begun >= call.call_number) continue;
    const auto& last = calls.back();
    const bool has_ended = last.call.kind == Call::Kind::end && last.call.root == 0 && last.ended == 0ns &&
                           last.call_number == static_cast<std::uint64_t>(attempt);
    if (has_ended)
      throw Error(ExitCode::user_error, "waiting in " + mine->text(),
                  str("rank ", r, " (", host(r), ") has returned from its work without that call, this rank's ",
                      node::nth(call.call_number)),
                  "All ranks of a communicator make the same calls in the same order");
    // Two ranks may each wait for the other in a call that the other has not begun.
    const std::uint64_t channel = record->waits_channel, call_number = record->waits_call_number;
    const auto waits_in = std::ranges::find_if(calls, [&](const watch::CallEntry& e) {
      return e.channel == channel && e.call_number == call_number && e.ended == 0ns;
    });
    if (call_number == 0 || waits_in == calls.end() || !mine->call.needs_all() || !waits_in->call.needs_all()) continue;
    const auto begun_here =
        own_record.call_counts.begun(channel);  // empty if this rank does not belong to that channel
    if (begun_here && *begun_here < call_number && main_waits_in(call) && record->waits_call_number == call_number)
      throw_mismatch(in(*mine), r, in(*waits_in));
  }
}

void WaitMonitor::throw_mismatch(const std::string& mine, int other, const std::string& theirs) const {
  if (other < rank_) throw node::mismatch(other, theirs, rank_, mine);
  throw node::mismatch(rank_, mine, other, theirs);
}

void WaitMonitor::note_wait(std::uint64_t channel, std::uint64_t call_number) noexcept {
  if (std::this_thread::get_id() != main_thread_) return;
  own_record().waits_call_number = 0;
  own_record().waits_channel = channel;
  own_record().waits_call_number = call_number;
}

bool WaitMonitor::main_waits_in(const WaitedFor& call) const {
  const auto& mine = *records_[static_cast<std::size_t>(rank_)];
  return mine.waits_channel == call.channel && mine.waits_call_number == call.call_number;
}

}  // namespace muster::detail::comm
