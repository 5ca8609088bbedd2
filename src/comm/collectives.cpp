#include "comm/collectives.hpp"

#include "base/duration.hpp"
#include "base/text.hpp"
#include "comm/channel.hpp"
#include "comm/hierarchy.hpp"
#include "comm/mpi_call.hpp"
#include "comm/progress.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace muster::detail::comm {

void require_reducible(Dtype type, ReduceOp op, std::string_view doing) {
  if (node::is_reducible(type, op)) return;
  if (op == ReduceOp::min || op == ReduceOp::max)
    throw Error(ExitCode::usage, doing, "complex numbers have no order", "Use sum or product");
  throw Error(ExitCode::usage, doing, "bit operations are for integers and booleans", "Use sum, product, min or max");
}

/// The message that a receive expects; count −1 for other operations.
struct Expected {
  int count = -1;  ///< elements
  MPI_Datatype type = MPI_DATATYPE_NULL;
};

/// An operation under way: either MPI requests (`pending`) or a ticket of the node's communicator (`local`).
struct Request::State {
  std::shared_ptr<Channel> channel;
  std::shared_ptr<Transport> transport;  ///< the channel's transport when the operation began
  node::Call call;
  Channel::RecordedCall recorded_call;
  std::vector<MPI_Request> pending = {};
  std::vector<Expected> expected = {};      ///< [pending]
  std::vector<MPI_Status> statuses = {};    ///< [pending]
  node::NodeCommunicator* local = nullptr;  ///< has issued the ticket; null if MPI carries the operation
  node::NodeCommunicator::Ticket ticket = 0;
  std::vector<std::shared_ptr<void>> kept = {};
  int source = -1;
  bool finished = false;

  /// Returns a new request, which an MPI call then fills in.
  MPI_Request* request(Expected what = {}) {
    expected.push_back(what);
    return &pending.emplace_back(MPI_REQUEST_NULL);
  }

  bool test() {
    if (finished) return true;
    require_in_use(*channel->world);
    finished = local != nullptr ? test_node() : test_mpi();
    if (finished) {
      channel->end(recorded_call);
      pending.clear();
      kept.clear();
    }
    return finished;
  }

  bool test_node() {
    return channel->run_exclusively([&] {
      advance_over_nodes(*channel);
      return local->done(ticket);
    });
  }

  bool test_mpi() {
    statuses.resize(pending.size());
    if (!test_all(pending, statuses)) return false;
    if (pending.size() == 1 && statuses.front().MPI_SOURCE >= 0) source = statuses.front().MPI_SOURCE;
    for (std::size_t i = 0; i < pending.size(); ++i) require_length(statuses[i], expected[i]);
    return true;
  }

  /// Throws an Error if the message is shorter than expected; MPI itself reports a longer one.
  static void require_length(const MPI_Status& status, const Expected& what) {
    if (what.count < 0) return;
    int count = 0;
    check(MPI_Get_count(&status, what.type, &count), "MPI_Get_count");
    if (count != what.count)
      throw Error(
          ExitCode::user_error, str("receiving from rank ", status.MPI_SOURCE),
          str(count == MPI_UNDEFINED ? "its message has another length" : str("its message has ", count, " elements"),
              ", but ", what.count, " are expected"),
          "Give tensors of the same type and size on both sides");
  }

  ~State() {
    if (finished || is_forked()) return;
    channel->end(recorded_call);
    if (local != nullptr) {
      if (kept.empty() && channel->topology.num_nodes == 1)
        channel->run_exclusively([&] { local->detach_data(ticket); });
      Channel::keep_until_idle(channel);
    }
    // MPI may still read or write the kept memory.
    std::vector<MPI_Request> receives, others;
    for (std::size_t i = 0; i < pending.size(); ++i) (expected[i].count < 0 ? others : receives).push_back(pending[i]);
    (call.is_collective() ? transport->collective : transport->point_to_point)
        ->abandon(std::move(receives), others, std::make_shared<std::vector<std::shared_ptr<void>>>(std::move(kept)));
  }
};

Request::Request() noexcept = default;
Request::Request(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Request::Request(Request&&) noexcept = default;
Request& Request::operator=(Request&&) noexcept = default;
Request::~Request() = default;

bool Request::done() {
  if (!state_ || state_->finished) return true;
  if (state_->test()) return true;
  Channel::advance_all();
  state_->channel->world->alarm.throw_if_raised();
  return false;
}

void Request::wait(std::optional<std::chrono::milliseconds> timeout) {
  if (!state_ || state_->test()) return;
  const auto doing = [&] {
    const char* const part_of = watch::ScopedCallName::name();
    return "waiting for " + (part_of == nullptr ? "" : str(part_of, ": ")) + state_->call.text();
  };
  state_->channel->wait([&] { return state_->test(); }, doing, state_->recorded_call, timeout);
}

void Request::wait_until(const std::function<bool()>& ready, const std::string& doing,
                         std::optional<std::chrono::milliseconds> timeout) {
  state_->channel->wait(
      ready, [&] { return doing; }, state_->recorded_call, timeout);
}

void Request::fail_after(std::chrono::milliseconds timeout, const std::string& doing) const {
  const auto longest = usable_timeout(timeout);
  state_->channel->past_timeout(state_->recorded_call, doing, watch::now() - longest, {}, longest, true);
}

bool Request::pending() const noexcept { return state_ && !state_->finished; }

int Request::source() const noexcept { return state_ ? state_->source : -1; }

void Request::keep(std::shared_ptr<void> memory) {
  if (state_ && !state_->finished) state_->kept.push_back(std::move(memory));
}

Collectives::Collectives(Communicator communicator, std::size_t chunk)
    : communicator_(std::move(communicator)), chunk_(std::min(chunk, most_per_call)) {}

namespace {

/// Calls body(first, count) for each chunk. An empty range has one chunk, so that every rank takes part.
template <class Body>
void each_chunk(std::size_t count, std::size_t chunk, Body&& body) {
  std::size_t first = 0;
  do {
    const auto part = std::min(chunk, count - first);
    body(first, static_cast<int>(part));
    first += part;
  } while (first < count);
}

using Kind = node::Call::Kind;

std::unique_ptr<Request::State> start(const Communicator& communicator, const node::Call& call, const char* name) {
  const auto& channel = Channel::of(communicator);
  const auto recorded_call = channel->begin(call, name);
  return std::unique_ptr<Request::State>(new Request::State{
      .channel = channel, .transport = channel->transport, .call = call, .recorded_call = recorded_call});
}

/// True if all ranks are on one node and share memory.
bool on_one_node(const Communicator& communicator) {
  const auto& channel = *Channel::of(communicator);
  return channel.hierarchy() && channel.topology.num_nodes == 1;
}

/// Starts an operation in the memory of the node: start(node's communicator) returns the ticket.
template <class Start>
Request on_node(std::unique_ptr<Request::State> state, Start&& start) {
  auto& local = *state->transport->hierarchy->communicator;
  state->channel->run_exclusively([&] {
    local.set_call_number(state->recorded_call.call_number);
    state->ticket = start(local);
    state->local = &local;
  });
  return Request(std::move(state));
}

std::byte* at(void* data, std::size_t element, Dtype type) {
  return static_cast<std::byte*>(data) + element * size_of(type);
}

void start_send(Request::State& state, MpiCommunicator& communicator, const Message& message, Dtype type, int tag,
                std::size_t chunk) {
  each_chunk(message.count, chunk, [&](std::size_t first, int part) {
    *state.request() = communicator.send(at(message.data, first, type), part, mpi_type(type), message.rank, tag);
  });
}
void start_receive(Request::State& state, MPI_Comm comm, const Message& message, Dtype type, int tag,
                   std::size_t chunk) {
  each_chunk(message.count, chunk, [&](std::size_t first, int part) {
    check(MPI_Irecv(at(message.data, first, type), part, mpi_type(type), message.rank, tag, comm,
                    state.request(Expected{part, mpi_type(type)})),
          "MPI_Irecv");
  });
}

/// Starts one MPI collective for each chunk of `data`.
void start_in_mpi(Request::State& state, void* data, std::size_t chunk) {
  auto of_chunk = state.call;
  each_chunk(state.call.count, chunk, [&](std::size_t first, int part) {
    of_chunk.count = static_cast<std::size_t>(part);
    *state.request() = state.transport->collective->start(of_chunk, at(data, first, of_chunk.type));
  });
}

}  // namespace

Request Collectives::barrier() {
  if (communicator_.size() == 1) return {};
  auto state = start(communicator_, {.kind = Kind::barrier}, name_);
  if (on_one_node(communicator_)) return on_node(std::move(state), [](auto& local) { return local.barrier(); });
  start_in_mpi(*state, nullptr, chunk_);
  return Request(std::move(state));
}

Request Collectives::broadcast(void* data, std::size_t count, Dtype type, int root) {
  if (communicator_.size() == 1) return {};
  auto state = start(communicator_, {.kind = Kind::broadcast, .type = type, .root = root, .count = count}, name_);
  if (on_one_node(communicator_))
    return on_node(std::move(state), [&](auto& local) { return local.broadcast(data, count * size_of(type), root); });
  start_in_mpi(*state, data, chunk_);
  return Request(std::move(state));
}

Request Collectives::all_reduce(void* data, std::size_t count, Dtype type, ReduceOp op) {
  require_reducible(type, op, "starting a reduction");
  if (communicator_.size() == 1) return {};
  auto state = start(communicator_, {.kind = Kind::all_reduce, .type = type, .op = op, .count = count}, name_);
  if (on_one_node(communicator_))
    return on_node(std::move(state), [&](auto& local) { return local.all_reduce(data, count, {type, op}); });
  if (auto& channel = *state->channel; channel.hierarchy())
    return on_node(std::move(state), [&](auto&) { return all_reduce_over_nodes(channel, data, count, {type, op}); });
  start_in_mpi(*state, data, chunk_);
  return Request(std::move(state));
}

Request Collectives::reduce(void* data, std::size_t count, Dtype type, ReduceOp op, int root) {
  require_reducible(type, op, "starting a reduction");
  if (communicator_.size() == 1) return {};
  auto state =
      start(communicator_, {.kind = Kind::reduce, .type = type, .op = op, .root = root, .count = count}, name_);
  if (on_one_node(communicator_))
    return on_node(std::move(state), [&](auto& local) { return local.reduce(data, count, {type, op}, root); });
  start_in_mpi(*state, data, chunk_);
  return Request(std::move(state));
}

Request Collectives::all_to_all(const std::vector<Message>& sends, const std::vector<Message>& receives, Dtype type) {
  const int rank = communicator_.rank();
  std::size_t total = 0;
  std::vector<bool> from(static_cast<std::size_t>(communicator_.size()));
  from[static_cast<std::size_t>(rank)] = true;
  for (const auto& piece : receives) {
    total += piece.count;
    from[static_cast<std::size_t>(piece.rank)] = true;
  }
  const bool from_all = std::ranges::all_of(from, std::identity());
  auto state =
      start(communicator_, {.kind = Kind::all_to_all, .type = type, .count = total, .from_all = from_all}, name_);
  std::vector<const Message*> from_self, to_self;
  for (const auto& piece : receives) {
    if (piece.rank == rank)
      to_self.push_back(&piece);
    else
      start_receive(*state, state->transport->collective, piece, type, 0, chunk_);
  }
  for (const auto& piece : sends) {
    if (piece.rank == rank)
      from_self.push_back(&piece);
    else
      start_send(*state, *state->transport->collective, piece, type, 0, chunk_);
  }
  for (std::size_t i = 0; i < std::min(from_self.size(), to_self.size()); ++i) {
    const auto bytes = std::min(from_self[i]->count, to_self[i]->count) * size_of(type);
    if (bytes != 0) std::memmove(to_self[i]->data, from_self[i]->data, bytes);
  }
  return Request(std::move(state));
}

Request Collectives::send(const void* data, std::size_t count, Dtype type, int to, int tag) {
  auto state = start(communicator_, {.kind = Kind::send, .type = type, .root = to, .count = count}, name_);
  start_send(*state, *state->transport->point_to_point, {const_cast<void*>(data), count, to}, type, tag, chunk_);
  return Request(std::move(state));
}

Request Collectives::receive(void* data, std::size_t count, Dtype type, int from, int tag) {
  auto state = start(communicator_, {.kind = Kind::receive, .type = type, .root = from, .count = count}, name_);
  start_receive(*state, state->transport->point_to_point, {data, count, from}, type, tag, chunk_);
  state->source = from;
  return Request(std::move(state));
}

Request Collectives::receive_any(void* data, std::size_t count, Dtype type, int tag) {
  if (count > chunk_)
    throw Error(ExitCode::usage, "receiving from any rank", str(count, " elements are more than one message holds"),
                "Receive from a named rank");
  auto state = start(communicator_, {.kind = Kind::receive, .type = type, .count = count}, name_);
  start_receive(*state, state->transport->point_to_point, {data, count, MPI_ANY_SOURCE}, type, tag, chunk_);
  return Request(std::move(state));
}

int Collectives::largest_tag() {
  const int* largest = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
  return found != 0 ? *largest : 32767;  // the least that the standard allows
}

}  // namespace muster::detail::comm
