#include "live/receiver.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"
#include "run/needs_new_job.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

namespace muster::detail::live {
namespace {

using Lock = std::unique_lock<std::mutex>;

std::uint64_t load(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }

using Clock = std::chrono::steady_clock;

std::uint64_t& word_of(live_ring& ring, std::int64_t seq) { return *live_word_of(&ring, seq); }

/// True if the fields lie inside of their arrays, and their blocks inside of the slots.
bool is_sound(const live_layout& layout, std::int64_t slot_bytes) {
  const auto is_name = [](const auto& name) { return ::memchr(name, 0, sizeof name) != nullptr; };
  const auto is_inside = [&](const live_field& field) {
    if (!is_name(field.name) || field.type < 0 || field.type > MUSTER_LIVE_UINT8 || field.dims < 1 ||
        field.dims > MUSTER_LIVE_MAX_DIMS || field.at < 0)
      return false;
    std::int64_t bytes = live_type_bytes(field.type), all = bytes;
    for (int d = 0; d < field.dims; ++d)
      if (field.local[d] < 0 || field.offset[d] < 0 || field.offset[d] > field.global[d] - field.local[d] ||
          __builtin_mul_overflow(all, field.global[d], &all) || __builtin_mul_overflow(bytes, field.local[d], &bytes))
        return false;
    return field.at <= slot_bytes && bytes <= slot_bytes - static_cast<std::int64_t>(sizeof(live_sample)) - field.at;
  };
  constexpr int most = MUSTER_LIVE_MAX_FIELDS;
  return layout.field_count > 0 && layout.field_count <= most && layout.parameter_count >= 0 &&
         layout.parameter_count <= most && std::all_of(layout.fields, layout.fields + layout.field_count, is_inside) &&
         std::all_of(layout.parameters, layout.parameters + layout.parameter_count,
                     [&](const live_parameter& parameter) { return is_name(parameter.name); });
}

/// True if the ring's places lie inside of its memory.
bool is_sound(const live_ring& ring, std::int64_t bytes, int trainers) {
  constexpr std::int64_t line = sizeof(live_sample);
  if (ring.slots < 1 || ring.slots > bytes / 8 || ring.slot_bytes < line || ring.slot_bytes > bytes / ring.slots)
    return false;
  live_ring placed{};
  live_place(&placed, ring.slots, ring.slot_bytes, trainers);
  return placed.file_bytes == bytes && ring.words_at == placed.words_at && ring.trainers_at == placed.trainers_at &&
         ring.data_at == placed.data_at && is_sound(ring.layout, ring.slot_bytes);
}

std::vector<LiveColumn> columns_of(const live_layout& layout) {
  std::vector<LiveColumn> columns;
  for (int f = 0; f < layout.field_count; ++f) {
    const auto& field = layout.fields[f];
    columns.push_back({.name = field.name,
                       .type = field.type,
                       .shape = {field.global, field.global + field.dims},
                       .bytes = live_volume(field.dims, field.global) * live_type_bytes(field.type)});
  }
  for (int p = 0; p < layout.parameter_count; ++p) columns.push_back({.name = layout.parameters[p].name});
  return columns;
}

/// Maps a file, or new memory if `file` is -1. Null if there is none.
template <class T>
std::shared_ptr<T> map_file(std::int64_t size, int file) {
  const auto bytes = static_cast<std::size_t>(size);
  const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<T*>(memory), [bytes](T* at) { ::munmap(at, bytes); }};
}

bool are_same(const std::vector<LiveColumn>& a, const std::vector<LiveColumn>& b) {
  return std::ranges::equal(a, b, [](const LiveColumn& x, const LiveColumn& y) {
    return x.name == y.name && x.type == y.type && x.shape == y.shape;
  });
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

void announce(const Stream& stream, const std::vector<int>& world_ranks) {
  std::vector<std::byte> bytes(sizeof(live_announcement) + world_ranks.size() * sizeof(std::int32_t));
  auto* const announcement = reinterpret_cast<live_announcement*>(bytes.data());
  stream.name.copy(announcement->name, sizeof announcement->name - 1);
  announcement->tag = stream.tag;
  announcement->count = static_cast<std::int32_t>(world_ranks.size());
  std::memcpy(announcement->ranks, world_ranks.data(), world_ranks.size() * sizeof(std::int32_t));
  live_announce(announcement);
}

bool Receiver::Solver::lacks(int rank) const {
  return rank < hello.ranks && !ranks[static_cast<std::size_t>(rank)].is_open();
}

bool Receiver::Solver::is_closing() const {
  return has_ended() || std::ranges::any_of(ranks, [](const Rank& rank) {
           return rank.is_closed || (rank.remote && rank.remote->end >= 0);
         });
}

bool Receiver::Solver::has_ended() const {
  return has_died || std::ranges::none_of(ranks, [](const Rank& rank) { return rank.is_open(); });
}

Receiver::Receiver(Stream of)
    : stream(std::move(of)),
      next(static_cast<std::size_t>(stream.options.solvers)),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ended_sent_(next.size()),
      resent_before_(next.size()) {
  sockaddr_un address{};
  const auto bytes = live_address(&address, stream.token.c_str(), stream.name.c_str(), stream.rank);
  if (listener_ < 0 || event_ < 0 || ::bind(listener_, reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
    throw Error(ExitCode::usage, "opening the live stream \"" + stream.name + "\"",
                errno == EADDRINUSE ? "the job has another muster::Live of this name"
                                    : str("its socket cannot be made: ", std::strerror(errno)),
                "Give each stream a name of its own, and raise the limit on open files if it is low");
}

void Receiver::start() {
  constexpr int waiting = 4096;
  ::listen(listener_, waiting);
  if (stream.has_other_nodes) channel_.reset(live_channel_open(stream.tag));
  // The program's signals go to its own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Receiver::~Receiver() {
  {
    const Lock lock(mutex);
    is_ending_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  for (auto& solver : solvers_)
    for (auto& rank : solver.ranks) leave(rank);
  if (!weights_sends_.empty()) static_cast<void>(new auto(std::move(weights_sends_)));  // MPI may still read them
}

void Receiver::wait_for_solver() {
  Lock lock(mutex);
  changed.wait_for(lock, stream.options.timeout,
                   [this] { return reservoir_.has_value() || has_failed() || all_ended(); });
  check();
  if (reservoir_) return;
  throw Error(ExitCode::retry, "waiting for a solver of the live stream \"" + stream.name + "\"",
              all_ended() ? "all have ended without a sample"
                          : str("none has sent a sample within ", stream.options.timeout.count(), " s"),
              "Start solvers that open a stream of this name in the same job, or raise LiveOptions::timeout");
}

void Receiver::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(event_, &one, sizeof one));
}

void Receiver::wake(const Rank& rank) {
  if (rank.socket >= 0 && __atomic_exchange_n(&rank.ring->solver_waits, 0, __ATOMIC_SEQ_CST) != 0)
    static_cast<void>(!::send(rank.socket, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

/// Makes a solver's rank look at what its ring tells.
void Receiver::tell(const Rank& rank) const {
  if (!rank.remote) return rank.ring ? wake(rank) : void();
  live_message message{};
  message.kind = LIVE_TOLD;
  message.seq = rank.remote->allowed;
  message.of.told.next = -1;
  message.of.told.gone = 1;
  if (rank.ring) message.of.told = rank.ring->told;
  live_channel_send(channel_.get(), rank.remote->rank, rank.remote->tag, message);
}

void Receiver::stop_solvers() {
  {
    const Lock lock(mutex);
    stops_solvers_ = true;
  }
  wake();
}

void Receiver::send_weights(std::string_view bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  Weights weights{.file = ::memfd_create("muster-weights", MFD_CLOEXEC)};
  constexpr std::size_t line = sizeof(live_sample);  // what MPI sends is rounded up to it
  const auto rounded = (bytes.size() / line + 1) * line;
  if (weights.file >= 0 && ::ftruncate(weights.file, static_cast<off_t>(rounded)) == 0)
    if (const auto memory = map_file<std::byte>(static_cast<std::int64_t>(rounded), weights.file)) {
      std::memcpy(memory.get(), bytes.data(), bytes.size());
      weights.memory = memory;
    }
  if (!weights.memory)
    throw Error(ExitCode::retry, "sending weights over the live stream \"" + stream.name + "\"",
                str("no memory can be made for ", size, " bytes: ", std::strerror(errno)), "Free some memory");
  {
    const Lock lock(mutex);
    weights.head = {.version = weights_.head.version + 1, .bytes = size};
    std::swap(weights_, weights);
  }
  wake();
}

/// Sends the newest weights to a solver's rank 0, which has asked for them.
void Receiver::send_weights(const Rank& rank) {
  const Lock lock(mutex);
  if (!weights_.memory) return;
  if (rank.remote) {
    live_message message{};
    message.kind = LIVE_WEIGHTS;
    message.of.weights = weights_.head;
    live_channel_send(channel_.get(), rank.remote->rank, rank.remote->tag, message);
    weights_sends_.emplace_back(
        live_send_slot(weights_.memory.get(), weights_.head.bytes, rank.remote->rank, stream.tag), weights_.memory);
    return;
  }
  static_cast<void>(!live_send_file(rank.socket, &weights_.head, sizeof weights_.head, weights_.file));
}

void Receiver::resume() {
  if (!is_paused_ && knows_next_) return wake();  // there may be room again
  is_paused_ = false;
  if (!std::exchange(knows_next_, true)) resent_before_ = next;
  wake();
}

void Receiver::restore(const Sent& before, const std::vector<std::int64_t>& next_samples) {
  before_ = before;
  for (std::size_t solver = 0; solver < next.size() && solver < next_samples.size(); ++solver)
    next[solver] = std::max(next[solver], next_samples[solver]);
  resent_before_ = next_samples;
  resent_before_.resize(next.size());
  knows_next_ = true;
  wake();
}

void Receiver::pause(Lock& lock) {
  is_paused_ = true;
  changed.wait(lock, [this] { return !is_copying_; });
}

bool Receiver::all_ended() const noexcept {
  return static_cast<int>(ended_.size()) >= stream.options.solvers && solvers_.empty();
}

std::vector<Receiver::Sent> Receiver::sent() const {
  auto all = ended_sent_;
  for (const auto& solver : solvers_)
    if (solver.is_ready) {
      const auto& ring = *solver.ranks[0].ring;
      auto& of_solver = all[static_cast<std::size_t>(solver.hello.solver)];
      of_solver.dropped += __atomic_load_n(&ring.dropped, __ATOMIC_ACQUIRE);  // first: the solver writes it last
      of_solver.sent += __atomic_load_n(&ring.sent, __ATOMIC_RELAXED);
      of_solver.waited_ms += __atomic_load_n(&ring.waited_ms, __ATOMIC_RELAXED);
    }
  return all;
}

void Receiver::run() {
  for (;;) {
    {
      const Lock lock(mutex);
      if (is_ending_) return;
      tell_solvers();
    }
    const bool has_served = serve_channel();
    serve_events(/*may_wait=*/!receive_all() && !has_served);
  }
}

/// Receives what is there, some samples of each solver. False if there is nothing to do until an event.
bool Receiver::receive_all() {
  constexpr int most = 64;
  bool has_done = false;
  for (std::size_t i = 0; i < solvers_.size();) {
    auto& solver = solvers_[i];
    // Whoever has ended before this look has published all of its samples.
    const bool had_ended = solver.has_ended();
    auto step = Step::nothing;
    if (solver.is_ready && !solver.was_refused)
      for (int taken = 0; taken < most && (step = receive(solver)) == Step::done; ++taken) has_done = true;
    if (had_ended && step == Step::nothing)
      end(solver);
    else
      ++i;
  }
  return has_done;
}

Receiver::Step Receiver::receive(Solver& solver) {
  if (!solver.is_taking)
    if (const auto step = claim(solver); !solver.is_taking) return step;
  for (auto& rank : solver.ranks) {
    if (&rank == &solver.ranks.front()) continue;
    if (load(word_of(*rank.ring, solver.seq)) == live_word(solver.seq, LIVE_FULL)) continue;
    if (rank.is_open() && !solver.has_died) return Step::blocked;
    // It may have published its block before it ended.
    if (load(word_of(*rank.ring, solver.seq)) == live_word(solver.seq, LIVE_FULL)) continue;
    return finish(solver, /*arrived=*/false);
  }
  return finish(solver, /*arrived=*/true);
}

/// Takes the next sample of this rank, if there is one and there is room for it.
Receiver::Step Receiver::claim(Solver& solver) {
  auto& ring = *solver.ranks.front().ring;
  auto* word = &word_of(ring, solver.seq);
  auto now = load(*word);
  if (live_seq(now) < solver.seq) return Step::nothing;
  if (live_seq(now) > solver.seq || live_state(now) != LIVE_FULL) {  // the solver has dropped it
    solver.seq += stream.ranks;
    return Step::done;
  }
  const auto number = live_slot(&ring, solver.seq)->number;
  const Lock lock(mutex);
  const bool was_resent = number < resent_before_[static_cast<std::size_t>(solver.hello.solver)];
  // Before the first draw or a restore() it is not known which samples are wanted.
  if (is_paused_ || !knows_next_ || (!was_resent && !reservoir_->can_take(number))) return Step::blocked;
  if (!__atomic_compare_exchange_n(word, &now, live_word(solver.seq, LIVE_TAKEN), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST))
    return Step::done;  // the solver has just dropped it
  solver.is_taking = true;
  solver.number = number;
  solver.slot.reset();
  if (was_resent)
    reservoir_->drop();
  else
    solver.slot = reservoir_->make_room(number);
  return Step::done;
}

Receiver::Step Receiver::finish(Solver& solver, bool arrived) {
  {
    const Lock lock(mutex);
    if (is_paused_) return Step::blocked;
    is_copying_ = true;
  }
  const auto& layout = solver.ranks.front().ring->layout;
  if (solver.slot && arrived) {
    for (const auto& rank : solver.ranks)
      for (int f = 0; f < layout.field_count; ++f) {
        const auto& field = rank.ring->layout.fields[f];
        const auto& column = columns_[static_cast<std::size_t>(f)];
        const auto bytes = live_type_bytes(field.type);
        std::int64_t first = 0;
        for (int d = 0; d < field.dims; ++d) first = first * field.global[d] + field.offset[d];
        live_copy_box(field.dims, bytes, field.local, live_block(rank.ring.get(), solver.seq) + field.at, field.local,
                      reinterpret_cast<char*>(column.data + *solver.slot * column.bytes) + first * bytes, field.global);
      }
    for (int p = 0; p < layout.parameter_count; ++p)
      std::memcpy(columns_[static_cast<std::size_t>(layout.field_count + p)].data + *solver.slot * 8,
                  &layout.parameters[p].value, 8);
  }
  {
    const Lock lock(mutex);
    if (solver.slot && arrived) reservoir_->fill(*solver.slot, solver.hello.solver, solver.number);
    if (solver.slot && !arrived) reservoir_->give_back(*solver.slot);
    is_copying_ = false;
    auto& after = next[static_cast<std::size_t>(solver.hello.solver)];
    after = std::max(after, solver.number + 1);
  }
  changed.notify_all();
  for (const auto& rank : solver.ranks) {
    __atomic_store_n(&word_of(*rank.ring, solver.seq), live_word(solver.seq, LIVE_EMPTY), __ATOMIC_SEQ_CST);
    wake(rank);
  }
  solver.is_taking = false;
  solver.seq += stream.ranks;
  return Step::done;
}

/// Tells each solver what it does not know yet. With `mutex` locked.
void Receiver::tell_solvers() {
  for (auto& solver : solvers_)
    for (auto& rank : solver.ranks) {
      if (!rank.ring) continue;
      auto& told = rank.ring->told;
      if (&rank == &solver.ranks.front() && told.weights_version < weights_.head.version) {
        __atomic_store_n(&told.weights_version, weights_.head.version, __ATOMIC_SEQ_CST);
        tell(rank);
      }
      if (stops_solvers_ && __atomic_exchange_n(&told.stop, 1, __ATOMIC_SEQ_CST) == 0) tell(rank);
      if (!knows_next_ || stream.rank != 0 || __atomic_load_n(&told.next, __ATOMIC_RELAXED) >= 0) continue;
      __atomic_store_n(&told.next, next[static_cast<std::size_t>(solver.hello.solver)], __ATOMIC_SEQ_CST);
      tell(rank);
    }
}

/// Serves the sockets. `may_wait`: waits for an event.
void Receiver::serve_events(bool may_wait) {
  using namespace std::chrono_literals;
  // MPI does not wake this thread.
  const auto slice = !may_wait ? 0us : !channel_ ? 1'000'000us : Clock::now() - last_message_ < 200ms ? 50us : 1'000us;
  if (may_wait) {
    for (auto& solver : solvers_)
      for (auto& rank : solver.ranks)
        if (rank.ring) __atomic_store_n(&live_trainers(rank.ring.get())[stream.rank], 1, __ATOMIC_SEQ_CST);
    may_wait = !receive_all();  // a sample may have come before its solver could see that this thread waits
  }

  const bool accepts = Clock::now() >= accepts_from_;
  std::vector<pollfd> events{{accepts ? int{listener_} : -1, POLLIN, 0}, {event_, POLLIN, 0}};
  for (const auto& stranger : strangers_) events.push_back({stranger, POLLIN, 0});
  for (const auto& solver : solvers_)
    for (const auto& rank : solver.ranks) events.push_back({rank.socket, POLLIN, 0});
  const timespec limit{slice / 1s, may_wait ? slice % 1'000'000us / 1us * 1000 : 0};
  if (::ppoll(events.data(), events.size(), &limit, nullptr) <= 0) return;
  std::uint64_t count = 0;
  static_cast<void>(!::read(event_, &count, sizeof count));
  // The connections first, in the order above: greeting and accepting change the lists.
  auto event = events.begin() + 2 + static_cast<std::ptrdiff_t>(strangers_.size());
  for (auto& solver : solvers_)
    for (auto& rank : solver.ranks)
      if ((event++)->revents != 0) read_from(solver, rank);
  std::vector<Descriptor> strangers;
  for (std::size_t i = 0; i < strangers_.size(); ++i)
    if (events[2 + i].revents != 0)
      greet(std::move(strangers_[i]));
    else
      strangers.push_back(std::move(strangers_[i]));
  strangers_ = std::move(strangers);
  if (events[0].revents != 0) accept_one();
}

void Receiver::accept_one() {
  Descriptor socket(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket >= 0 && live_is_own_user(socket) != 0) strangers_.push_back(std::move(socket));
  if (socket >= 0 || (errno != EMFILE && errno != ENFILE)) return;
  if (accepts_from_ == Clock::time_point())
    log::warn(str("live stream \"", stream.name, "\": a solver cannot be accepted: ", std::strerror(errno),
                  ". Raise the limit on open files (ulimit -n)"));
  accepts_from_ = Clock::now() + std::chrono::milliseconds(100);
}

/// What speaks against a solver's rank; empty if nothing does.
std::string Receiver::reason_to_refuse(const live_hello& hello) const {
  if (hello.protocol != LIVE_PROTOCOL) return "the trainer has another version of muster. Build both with the same";
  if (hello.solver < 0 || hello.solver >= stream.options.solvers)
    return str("the trainer knows solvers 0 to ", stream.options.solvers - 1, ", and this is solver ", hello.solver,
               ". Set LiveOptions::solvers");
  if (hello.ranks < 1 || hello.ranks > 1 << 20 || hello.rank < 0 || hello.rank >= hello.ranks)
    return "its rank is wrong. Report this";
  for (const auto& solver : solvers_)
    if (solver.hello.solver == hello.solver &&
        !(solver.hello.id == hello.id ? solver.lacks(hello.rank) : solver.is_closing()))
      return str("solver ", hello.solver,
                 " has opened this stream already. Give each solver a number of its own, and "
                 "open a stream once");
  return "";
}

/// Reads who has connected, and answers.
void Receiver::greet(Descriptor socket) {
  live_hello hello{};
  if (::recv(socket, &hello, sizeof hello, MSG_DONTWAIT) != static_cast<ssize_t>(sizeof hello)) return;
  live_welcome welcome{.protocol = LIVE_PROTOCOL, .ranks = stream.ranks, .refusal = {}};
  const auto text = reason_to_refuse(hello);
  text.copy(welcome.refusal, sizeof welcome.refusal - 1);
  if (::send(socket, &welcome, sizeof welcome, MSG_NOSIGNAL) < 0 || !text.empty()) return;
  add(hello, {.socket = std::move(socket)});
}

/// Adds a rank of a solver.
void Receiver::add(const live_hello& hello, Rank rank) {
  const Lock lock(mutex);
  ended_.erase(hello.solver);  // it comes again
  auto solver = std::ranges::find_if(solvers_, [&](const Solver& known) { return known.hello.id == hello.id; });
  if (solver == solvers_.end()) {
    solvers_.push_back({.hello = hello, .ranks = std::vector<Rank>(static_cast<std::size_t>(hello.ranks))});
    solver = std::prev(solvers_.end());
    while (live_rank_of(solver->seq, hello.solver, stream.ranks) != stream.rank) ++solver->seq;
  }
  if (rank.remote) rank.remote->answered = rank.remote->allowed = solver->seq;
  solver->ranks[static_cast<std::size_t>(hello.rank)] = std::move(rank);
}

/// Serves the solvers on other nodes. False if nothing has happened.
bool Receiver::serve_channel() {
  if (!channel_) return false;
  bool has_served = false;
  live_message message{};
  for (int source = 0; live_channel_receive(channel_.get(), &message, &source) != 0; has_served = true)
    serve(message, source);
  for (auto& solver : solvers_)
    for (auto& rank : solver.ranks)
      if (rank.remote && rank.remote->is_open) has_served = receive_slots(solver, rank) || has_served;
  std::erase_if(weights_sends_, [](auto& send) { return live_is_over(&send.first) != 0; });
  if (has_served) last_message_ = Clock::now();
  return has_served;
}

void Receiver::serve(const live_message& message, int source) {
  if (message.kind == LIVE_HELLO) {
    const auto& hello = message.of.hello;
    const auto text = reason_to_refuse(hello);
    live_message welcome{};
    welcome.kind = LIVE_WELCOME;
    text.copy(welcome.of.told.refusal, sizeof welcome.of.told.refusal - 1);
    live_channel_send(channel_.get(), source, message.tag, welcome);
    if (!text.empty()) return;
    Rank rank{.remote = std::make_unique<Remote>()};
    rank.remote->rank = source;
    rank.remote->tag = message.tag;
    rank.remote->receives.fill(MPI_REQUEST_NULL);
    return add(hello, std::move(rank));
  }
  for (auto& solver : solvers_)
    for (auto& rank : solver.ranks) {
      if (!rank.remote || rank.remote->rank != source || rank.remote->tag != message.tag) continue;
      auto& layout = rank.remote->layout;
      if (message.kind == LIVE_FIELD && layout.field_count < MUSTER_LIVE_MAX_FIELDS)
        layout.fields[layout.field_count++] = message.of.field;
      if (message.kind == LIVE_PARAMETER && layout.parameter_count < MUSTER_LIVE_MAX_FIELDS)
        layout.parameters[layout.parameter_count++] = message.of.parameter;
      if (message.kind == LIVE_BEGIN) {
        // This rank uses LIVE_AHEAD of these slots; the system gives no memory for the others.
        live_ring head{};
        head.layout = layout;
        head.told.next = -1;
        constexpr std::int64_t most = std::int64_t{1} << 48;
        live_place(&head, std::int64_t{LIVE_AHEAD} * stream.ranks, std::clamp<std::int64_t>(message.seq, 0, most),
                   stream.ranks);
        const auto ring = map_file<live_ring>(head.file_bytes, -1);
        if (ring) *ring = head;
        take_ring(solver, rank, ring, head.file_bytes);
      }
      if (message.kind == LIVE_WANT) send_weights(rank);
      if (message.kind != LIVE_END) return;
      rank.remote->end = message.seq;
      if (!rank.ring) return;
      __atomic_store_n(&rank.ring->sent, message.of.end.sent, __ATOMIC_RELAXED);
      __atomic_store_n(&rank.ring->dropped, message.of.end.dropped, __ATOMIC_RELEASE);
      return;
    }
}

/// Looks for slots that have come from a rank on another node, and lets it send more. False if nothing has happened.
bool Receiver::receive_slots(const Solver& solver, Rank& rank) {
  auto& remote = *rank.remote;
  const auto receive_of = [&](std::int64_t seq) -> MPI_Request& {
    return remote.receives[static_cast<std::size_t>(seq / stream.ranks % LIVE_AHEAD)];
  };
  bool has_come = false;
  for (; remote.answered < remote.allowed && live_is_over(&receive_of(remote.answered)) != 0; has_come = true) {
    const auto& slot = *live_slot(rank.ring.get(), remote.answered);
    if (slot.is_revoked == 0 && remote.end < 0) {  // the end has the last counts
      __atomic_store_n(&rank.ring->sent, slot.sent, __ATOMIC_RELAXED);
      __atomic_store_n(&rank.ring->waited_ms, slot.waited_ms, __ATOMIC_RELAXED);
      __atomic_store_n(&rank.ring->dropped, slot.dropped, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&word_of(*rank.ring, remote.answered),
                     live_word(remote.answered, slot.is_revoked == 0 ? LIVE_FULL : LIVE_EMPTY), __ATOMIC_SEQ_CST);
    remote.answered += stream.ranks;
  }
  if (remote.end >= 0 && remote.answered >= remote.end) {
    for (auto& receive : remote.receives)
      if (receive != MPI_REQUEST_NULL) live_cancel(&receive);
    remote.is_open = false;
    return true;
  }
  if (!rank.ring) return has_come;
  // A slot is free when its last sample has been taken, and this rank has answered it.
  const auto may_come = std::min(solver.seq, remote.answered) + std::int64_t{LIVE_AHEAD} * stream.ranks;
  if (remote.allowed >= may_come) return has_come;
  for (; remote.allowed < may_come; remote.allowed += stream.ranks)
    receive_of(remote.allowed) =
        live_receive_slot(live_slot(rank.ring.get(), remote.allowed), rank.ring->slot_bytes, remote.rank, remote.tag);
  tell(rank);
  return true;
}

/// Reads a ring, or a byte that has only woken this thread, or the end of the connection.
void Receiver::read_from(Solver& solver, Rank& rank) {
  for (;;) {
    char byte = 0;
    int file = LIVE_NO_FILE;
    const auto got = live_receive_file(rank.socket, &byte, 1, &file);
    if (got == LIVE_NOTHING) return;
    if (got < 0 && errno == ECONNRESET) continue;  // it has not read all, and its last byte is still to be read here
    if (got <= 0) {
      rank.socket = Descriptor();
      if (rank.is_closed || std::exchange(solver.has_died, true) || stream.rank != 0) return;
      return log::warn(str("live stream \"", stream.name, "\": rank ", &rank - solver.ranks.data(), " of solver ",
                           solver.hello.solver, " has ended without muster_live_close()"));
    }
    if (byte == LIVE_CLOSED) rank.is_closed = true;
    if (byte == LIVE_WANTED) send_weights(rank);
    if (file >= 0) {
      const Descriptor owned(file);
      struct stat status {};
      const bool is_file = ::fstat(file, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(live_ring));
      take_ring(solver, rank, is_file ? map_file<live_ring>(status.st_size, file) : nullptr, status.st_size);
    } else if (file == LIVE_LOST_FILE) {
      take_ring(solver, rank, nullptr, 0);
    }
  }
}

/// Takes the ring of a solver's rank, null if it could not be mapped.
void Receiver::take_ring(Solver& solver, Rank& rank, std::shared_ptr<live_ring> ring, std::int64_t bytes) {
  const Lock lock(mutex);
  if (rank.ring) return;
  if (!ring || !is_sound(*ring, bytes, stream.ranks)) {
    log::warn(str("live stream \"", stream.name, "\": the memory of solver ", solver.hello.solver,
                  " cannot be mapped. Lower bytes in its options, or raise the limit on open files (ulimit -n)"));
    leave(rank);
    return;
  }
  rank.ring = std::move(ring);
  if (std::ranges::all_of(solver.ranks, [](const Rank& each) { return each.ring != nullptr; })) begin(solver);
}

/// Tells a rank that no more of its samples are received.
void Receiver::leave(Rank& rank) {
  if (rank.ring) __atomic_store_n(&rank.ring->told.gone, 1, __ATOMIC_SEQ_CST);
  if (rank.is_open()) tell(rank);
  rank.socket = Descriptor();
  if (!rank.remote || !std::exchange(rank.remote->is_open, false) || !rank.ring) return;
  // MPI may still receive into it, and must: otherwise the solver's sends would not end.
  static_cast<void>(new std::shared_ptr<live_ring>(std::move(rank.ring)));
}

/// All ranks of the solver have declared their blocks. With `mutex` locked.
void Receiver::begin(Solver& solver) {
  const auto& layout = solver.ranks.front().ring->layout;
  if (!reservoir_) make_memory(layout);
  solver.is_ready = true;
  solver.was_refused = !std::ranges::all_of(
      solver.ranks, [&](const Rank& rank) { return are_same(columns_, columns_of(rank.ring->layout)); });
  changed.notify_all();
  if (!solver.was_refused) {
    __atomic_store_n(&solver.ranks.front().ring->told.accepted, 1, __ATOMIC_SEQ_CST);
    return tell(solver.ranks.front());
  }
  // Rank 0 last: the solver acts when it sees it there.
  for (auto rank = solver.ranks.rbegin(); rank != solver.ranks.rend(); ++rank) {
    auto& told = rank->ring->told;
    std::snprintf(told.refusal, sizeof told.refusal,
                  "its fields and parameters are not those of the stream's first solver. Declare the same in all "
                  "solvers of a stream");
    __atomic_store_n(&told.refused, 1, __ATOMIC_SEQ_CST);
    tell(*rank);
  }
}

/// Makes the memory for samples of this layout. With `mutex` locked.
void Receiver::make_memory(const live_layout& layout) {
  const auto doing = "making the memory of the live stream \"" + stream.name + "\"";
  columns_ = columns_of(layout);
  constexpr std::int64_t bookkeeping = 64;
  std::int64_t sample_bytes = bookkeeping;
  for (const auto& column : columns_) sample_bytes += column.bytes;
  const auto& options = stream.options;
  const auto share = [&](std::int64_t count) { return (count + stream.ranks - 1) / stream.ranks; };
  const auto validation = options.validation_every > 0 ? share(options.validation_samples) : 0;
  // Samples that are received before they are needed count, too.
  const std::int64_t ahead = stream.any_has_other_nodes ? LIVE_AHEAD * options.solvers : 0;
  auto capacity = options.bytes / sample_bytes;
  const auto needed = ahead + validation + std::max<std::int64_t>(share(options.watermark), 1);
  if (capacity < needed) {
    error_ = std::make_exception_ptr(
        Error(ExitCode::usage, doing,
              str("a sample takes ", sample_bytes, " bytes, a rank needs ", needed,
                  " samples for the watermark and validation, and LiveOptions::bytes is ", options.bytes),
              "Raise bytes, or lower watermark or validation_samples"));
    columns_.clear();
    return;
  }
  capacity -= ahead;
  const auto bytes = static_cast<std::size_t>(capacity * (sample_bytes - bookkeeping));
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    error_ = std::make_exception_ptr(Error(ExitCode::usage, doing,
                                           str(bytes, " bytes cannot be mapped: ", std::strerror(errno)),
                                           "Lower LiveOptions::bytes"));
    columns_.clear();
    return;
  }
  memory_ = {static_cast<std::byte*>(memory), [bytes](std::byte* at) { ::munmap(at, bytes); }};
  auto* at = memory_.get();
  // Values of 8 bytes first, so that all are aligned.
  for (const std::int64_t size : {8, 4, 1})
    for (auto& column : columns_)
      if (live_type_bytes(column.type) == size) column.data = std::exchange(at, at + capacity * column.bytes);
  reservoir_.emplace(Reservoir::Options{.rule = options.rule,
                                        .capacity = capacity,
                                        .validation = validation,
                                        .validation_every = options.validation_every,
                                        .max_uses = options.max_uses,
                                        .seed = stream.seed});
}

/// Forgets a solver that has ended.
void Receiver::end(Solver& solver) {
  {
    const Lock lock(mutex);
    if (solver.is_ready) {
      const auto& ring = *solver.ranks.front().ring;
      auto& sent = ended_sent_[static_cast<std::size_t>(solver.hello.solver)];
      sent.sent += ring.sent;
      sent.dropped += ring.dropped;
      sent.waited_ms += ring.waited_ms;
    }
    ended_[solver.hello.solver] = solver.has_died;
    const bool ends = solver.has_died && stream.options.on_solver_death == LiveFault::end;
    const auto number = solver.hello.solver;
    for (auto& rank : solver.ranks) leave(rank);
    solvers_.erase(solvers_.begin() + (&solver - solvers_.data()));
    const auto has_died = [](const auto& ended) { return ended.second; };
    if (!error_ && (ends || (all_ended() && std::ranges::all_of(ended_, has_died))))
      error_ = std::make_exception_ptr(
          run::NeedsNewJob(Error(ExitCode::retry, "reading the live stream \"" + stream.name + "\"",
                                 ends ? str("solver ", number, " has ended without muster_live_close()")
                                      : "all solvers have ended without muster_live_close()",
                                 "Look why, and start the job again")));
  }
  changed.notify_all();
}

}  // namespace muster::detail::live
