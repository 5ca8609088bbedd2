#include "comm/channel.hpp"

#include "base/duration.hpp"
#include "base/text.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "comm/progress.hpp"
#include "comm/wait.hpp"
#include "watch/time_use.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <iterator>
#include <map>

namespace muster::detail::comm {
namespace {

/// Returns the topology of a communicator for its rank `rank`. `ranks` are the communicator's ranks as `placement`
/// numbers them.
Topology make_topology(const Placement& placement, const std::vector<int>& ranks, int rank) {
  Topology topology;
  topology.local_size = 0;
  std::map<int, int> number;
  for (const int r : ranks) {
    const int node = placement.node_of_rank[static_cast<std::size_t>(r)];
    topology.node_of_rank.push_back(number.try_emplace(node, static_cast<int>(number.size())).first->second);
    topology.hosts.push_back(placement.hosts[static_cast<std::size_t>(r)]);
  }
  topology.num_nodes = static_cast<int>(number.size());
  topology.node_rank = topology.node_of_rank[static_cast<std::size_t>(rank)];
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (topology.node_of_rank[r] != topology.node_rank) continue;
    ++topology.local_size;
    if (static_cast<int>(r) < rank) ++topology.local_rank;
  }
  return topology;
}

/// Makes the hierarchy of a channel; null if there is only one rank, or if the ranks of a node cannot share memory.
/// Collective over `over`.
std::shared_ptr<Hierarchy> make_hierarchy(MpiCommunicator& over, const Topology& topology,
                                          const std::vector<int>& world_ranks) {
  const auto size = topology.node_of_rank.size();
  if (size == 1) return nullptr;
  auto made = std::make_shared<Hierarchy>();
  std::vector<std::vector<int>> ranks(static_cast<std::size_t>(topology.num_nodes));  // of each node
  for (std::size_t r = 0; r < size; ++r)
    ranks[static_cast<std::size_t>(topology.node_of_rank[r])].push_back(static_cast<int>(r));
  made->ranks = ranks[static_cast<std::size_t>(topology.node_rank)];
  const auto least = std::ranges::min(ranks, {}, &std::vector<int>::size).size();
  made->num_leaders = static_cast<int>(least);
  if (topology.local_rank < made->num_leaders) {
    made->leaders = {.communicator = &over, .node = topology.node_rank};
    for (const auto& of_node : ranks)
      made->leaders.ranks.push_back(of_node[static_cast<std::size_t>(topology.local_rank)]);
  }

  const auto bytes = node::NodeCommunicator::memory_bytes(topology.local_size);
  std::byte* memory = nullptr;
  if (topology.num_nodes == static_cast<int>(size)) {
    // One rank per node: the node's communicator has only this rank, which leads the exchange between nodes.
    const auto own = node::local_memory(bytes);
    memory = own.get();
    made->memory = own;
  } else {
    const auto segment = map_node_segment(over, made->ranks, bytes, 0, topology.local_rank == 0 ? bytes : 0);
    if (!segment) return nullptr;
    memory = segment->data();
    made->memory = segment;
  }
  std::vector<int> names;
  for (const int r : made->ranks) names.push_back(world_ranks[static_cast<std::size_t>(r)]);
  made->communicator =
      std::make_unique<node::NodeCommunicator>(memory, topology.local_rank, topology.local_size, std::move(names));
  return made;
}

/// All channels of this process.
struct Channels {
  std::mutex mutex;
  std::vector<Channel*> all;
  std::vector<std::shared_ptr<Channel>> kept;  ///< see Channel::keep_until_idle()
};
Channels& channels() {
  static auto* const channels = new Channels;  // never destroyed, since channels may be destroyed at exit
  return *channels;
}

}  // namespace

Channel::Channel(std::vector<PooledCommunicator> own, std::shared_ptr<World> the_world, std::vector<int> ranks)
    : world(std::move(the_world)),
      world_ranks(std::move(ranks)),
      rank(rank_in(own[0])),
      size(size_in(own[0])),
      topology(make_topology(world->placement, world_ranks, rank)),
      id(new_id(own[0], world_ranks.front())),
      call_count_slot(world->wait_monitor.own_record().call_counts.open(id)),
      transport(new Transport{std::move(own[0]), std::move(own[1]), nullptr}) {
  transport->hierarchy = make_hierarchy(*transport->collective, topology, world_ranks);
  const std::lock_guard lock(channels().mutex);
  channels().all.push_back(this);
}

Channel::~Channel() {
  if (is_forked()) return;
  {
    const std::lock_guard lock(channels().mutex);
    std::erase(channels().all, this);
  }
  abandon_over_nodes();
}

void Channel::abandon_over_nodes() {
  if (hierarchy()) hierarchy()->over_nodes.clear();
}

std::vector<int> Channel::all_ranks() const { return ranks_in(transport->collective); }

std::vector<int> Channel::members(const std::vector<int>& ranks) const {
  std::vector<int> members;
  for (const int r : ranks)
    members.push_back(world->members[static_cast<std::size_t>(world_ranks[static_cast<std::size_t>(r)])]);
  return members;
}

std::vector<PooledCommunicator> Channel::take_from_pool(std::size_t count, const std::vector<int>& ranks,
                                                        const char* doing) const {
  return world->pool->take(count, members(ranks), *transport->collective, ranks, doing);
}

Communicator Channel::open_part(const std::vector<int>& ranks, const char* doing) const {
  std::vector<int> theirs;
  for (const int r : ranks) theirs.push_back(world_ranks[static_cast<std::size_t>(r)]);
  return open(take_from_pool(2, ranks, doing), world, std::move(theirs));
}

void Channel::note_under_way() {
  const bool idle = !hierarchy() || hierarchy()->communicator->is_idle();
  under_way_ = idle ? -1 : world->failures.load();
}

void Channel::try_to_advance() {
  if (!is_under_way()) return;
  const std::unique_lock lock(exclusive_, std::try_to_lock);
  if (!lock || !hierarchy()) return;
  try {
    advance_over_nodes(*this);
    hierarchy()->communicator->advance();
    note_under_way();
  } catch (const Error&) {
    under_way_ = -1;
  }
}

void Channel::advance_all() {
  {
    const std::unique_lock lock(channels().mutex, std::try_to_lock);
    if (!lock) return;  // another thread does this now
    for (auto* channel : channels().all) channel->try_to_advance();
    if (channels().kept.empty()) return;
  }
  release_idle();
}

void Channel::release_idle() {
  std::vector<std::shared_ptr<Channel>> idle;  // destroyed after the lock is released: ~Channel() takes it too
  const std::lock_guard lock(channels().mutex);
  auto& kept = channels().kept;
  const auto rest = std::ranges::partition(kept, [](const auto& channel) { return channel->is_under_way(); });
  idle.assign(std::make_move_iterator(rest.begin()), std::make_move_iterator(rest.end()));
  kept.erase(rest.begin(), rest.end());
}

void Channel::keep_until_idle(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(channels().mutex);
  auto& kept = channels().kept;
  if (std::ranges::find(kept, channel) == kept.end()) kept.push_back(std::move(channel));
}

void Channel::renew() {
  const auto all = all_ranks();
  Channel fresh(world->pool->take(2, world->members, *world->agreement, all, "starting again after a failure"), world,
                world_ranks);
  const std::lock_guard lock(exclusive_);
  abandon_over_nodes();
  id = fresh.id;
  call_count = 0;
  call_count_slot = fresh.call_count_slot;
  transport.swap(fresh.transport);
  under_way_ = -1;
}

Channel::RecordedCall Channel::begin(const node::Call& call, const char* name) {
  require_in_use(*world);
  if (world->has_outer) throw_outer_cause(*world);
  auto& record = world->wait_monitor.own_record();
  if (!call.is_collective()) return {record.calls.begin(id, 0, call, name), 0, call.root};
  RecordedCall recorded_call{record.calls.begin(id, ++call_count, call, name), call_count};
  record.call_counts.begin(call_count_slot, id, call_count);
  if (watch::is_tracing())
    recorded_call.event = {.name = name == nullptr ? call.name() : watch::interned(name),
                           .track = watch::TraceTrack::calls,
                           .begin_ns = watch::trace_begin(),
                           .channel = id,
                           .call = call_count,
                           .bytes = static_cast<std::int64_t>(call.count * node::size_of(call.type))};
  return recorded_call;
}

void Channel::wait(const std::function<bool()>& ready, const std::function<std::string()>& doing,
                   const RecordedCall& recorded_call, std::optional<std::chrono::milliseconds> timeout) {
  using namespace std::chrono_literals;
  if (ready()) return;
  const watch::ScopedActivity waiting(watch::Activity::wait);
  watch::TraceSpan span("wait for ranks");
  span.set_call(id, recorded_call.call_number);
  // A rank that waits for longer than this compares its call with the calls of the other ranks, again and again.
  constexpr auto between_comparisons = 100ms;
  const auto call_number = recorded_call.call_number;
  const WaitedFor call{id, call_number, world_ranks};
  const auto longest = usable_timeout(timeout.value_or(world->limits.timeout));
  struct WaitNote {  // records that the main thread waits here, once the wait is long
    WaitMonitor& wait_monitor;
    bool is_set = false;
    void set(std::uint64_t channel, std::uint64_t call) {
      wait_monitor.note_wait(channel, call);
      is_set = true;
    }
    ~WaitNote() {
      if (is_set) wait_monitor.note_wait(0, 0);
    }
  } wait_note{world->wait_monitor};
  const auto since = watch::now();
  auto compared = since;
  WaitTime time;
  bool has_ended = false;  // ready() may take a message, so it is not called again
  const auto ended = [&] { return has_ended = has_ended || ready(); };
  const auto listen = [&] {
    time.until();
    require_in_use(*world);
    advance_all();
    try {
      world->alarm.throw_if_raised();
    } catch (const RemoteError&) {
      if (!ended()) throw;  // otherwise the alarm does not concern this call: it has finished
      return;
    }
    if (watch::now() - compared < between_comparisons) return;
    compared = watch::now();
    world->wait_monitor.answer_in_wait();
    if (call_number == 0) return;
    wait_note.set(id, call_number);
    world->wait_monitor.compare(call, world->agreements + 1);
  };
  for (auto more = longest; !wait_until(ended, more, listen) && !has_ended;)
    more = past_timeout(recorded_call, doing(), since, time.suspended(), longest, timeout.has_value());
}

std::chrono::milliseconds Channel::past_timeout(const RecordedCall& recorded_call, const std::string& doing,
                                                std::chrono::nanoseconds since, std::chrono::nanoseconds suspended,
                                                std::chrono::milliseconds longest, bool is_own) const {
  const auto call_number = recorded_call.call_number;
  std::vector<int> other;
  if (recorded_call.other >= 0) other.push_back(world_ranks[static_cast<std::size_t>(recorded_call.other)]);
  const auto decision = world->wait_monitor.decide({id, call_number, world_ranks}, since, suspended, longest,
                                                   other.empty() ? nullptr : &other);
  if (!is_own && decision.more > std::chrono::milliseconds(0)) return decision.more;
  const auto fact =
      formatted("not finished within %g s on rank %d of %d", static_cast<double>(longest.count()) / 1000, rank, size) +
      (call_number > 0 ? ", its " + node::nth(call_number) + " call there" : "") + world->wait_monitor.at_step() +
      ". " + decision.fact;
  if (is_own)
    throw Error(
        ExitCode::retry, doing, fact,
        "A rank is stuck, lost or in another collective; the timeout of the group or of the call sets the limit" +
            decision.details);
  throw WaitTimeout(
      ExitCode::retry, doing, fact,
      "A rank is stuck, lost or in another collective; --timeout or DataParallelOptions::timeout sets the "
      "limit, and session.keep_alive() announces work that takes longer" +
          decision.details);
}

void wait_on(const Communicator& communicator, const std::function<bool()>& ready,
             const std::function<std::string()>& doing, std::optional<std::chrono::milliseconds> timeout) {
  auto& channel = *Channel::of(communicator);
  const auto call = channel.begin({.kind = node::Call::Kind::average_gradients});
  channel.wait(ready, doing, call, timeout);
  channel.end(call);
}

}  // namespace muster::detail::comm
