#include "live/receiver.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

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

std::uint64_t& word_of(live_ring& ring, std::int64_t seq) { return live_words(&ring)[seq % ring.slots]; }

/// True if the ring's places lie inside of its memory.
bool is_sound(const live_ring& ring, std::int64_t bytes) {
  std::int64_t data = 0;
  return ring.file_bytes == bytes && ring.slots > 0 && ring.slot_bytes >= 0 && ring.layout.field_count > 0 &&
         ring.layout.field_count <= MUSTER_LIVE_MAX_FIELDS && ring.layout.parameter_count >= 0 &&
         ring.layout.parameter_count <= MUSTER_LIVE_MAX_FIELDS && ring.words_at > 0 && ring.numbers_at > 0 &&
         ring.trainers_at > 0 && ring.data_at > 0 && ring.data_at <= bytes && ring.trainers_at < bytes &&
         !__builtin_mul_overflow(ring.slots, ring.slot_bytes, &data) && data <= bytes - ring.data_at;
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

bool are_same(const std::vector<LiveColumn>& a, const std::vector<LiveColumn>& b) {
  return std::ranges::equal(a, b, [](const LiveColumn& x, const LiveColumn& y) {
    return x.name == y.name && x.type == y.type && x.shape == y.shape;
  });
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

bool Receiver::Solver::has_ended() const {
  return std::ranges::all_of(ranks, [](const Rank& rank) { return rank.socket < 0; });
}

Receiver::Receiver(Stream of)
    : stream(std::move(of)),
      next(static_cast<std::size_t>(stream.options.solvers)),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
      event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
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
    for (auto& rank : solver.ranks) {
      if (rank.ring) __atomic_store_n(&rank.ring->gone, 1, __ATOMIC_SEQ_CST);
      if (rank.ring) wake(rank);
    }
}

void Receiver::wait_for_solver() {
  Lock lock(mutex);
  const bool came =
      changed.wait_for(lock, stream.options.timeout, [this] { return reservoir_.has_value() || error_.has_value(); });
  if (error_) throw Error(*error_);
  if (!came)
    throw Error(ExitCode::retry, "waiting for a solver of the live stream \"" + stream.name + "\"",
                str("none has sent a sample within ", stream.options.timeout.count(), " s"),
                "Start solvers that open a stream of this name in the same job and on the same node, or raise "
                "LiveOptions::timeout");
}

void Receiver::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(event_, &one, sizeof one));
}

void Receiver::wake(const Rank& rank) {
  if (rank.socket >= 0 && __atomic_exchange_n(&rank.ring->solver_waits, 0, __ATOMIC_SEQ_CST) != 0)
    static_cast<void>(!::send(rank.socket, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT));
}

void Receiver::stop_solvers() {
  {
    const Lock lock(mutex);
    stops_solvers_ = true;
  }
  wake();
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

Receiver::Sent Receiver::sent() const noexcept {
  Sent all{before_.sent + ended_sent_.sent, before_.dropped + ended_sent_.dropped};
  for (const auto& solver : solvers_)
    if (solver.is_ready) {
      const auto& ring = *solver.ranks[0].ring;
      all.dropped += __atomic_load_n(&ring.dropped, __ATOMIC_ACQUIRE);  // first, since the solver writes it last
      all.sent += __atomic_load_n(&ring.sent, __ATOMIC_RELAXED);
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
    serve_events(/*may_wait=*/!receive_all());
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
    if (rank.socket >= 0) return Step::blocked;
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
  const auto number = live_numbers(&ring)[solver.seq % ring.slots];
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
        live_copy_box(field.dims, bytes, field.local,
                      live_slot(rank.ring.get(), solver.seq % rank.ring->slots) + field.at, field.local,
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
      if (stops_solvers_ && __atomic_exchange_n(&rank.ring->stop, 1, __ATOMIC_SEQ_CST) == 0) wake(rank);
      if (!knows_next_ || stream.rank != 0 || __atomic_load_n(&rank.ring->next, __ATOMIC_RELAXED) >= 0) continue;
      __atomic_store_n(&rank.ring->next, next[static_cast<std::size_t>(solver.hello.solver)], __ATOMIC_SEQ_CST);
      wake(rank);
    }
}

/// Serves the sockets. `may_wait`: waits for an event.
void Receiver::serve_events(bool may_wait) {
  constexpr int slice_ms = 1000;
  if (may_wait) {
    for (auto& solver : solvers_)
      for (auto& rank : solver.ranks)
        if (rank.ring) __atomic_store_n(&live_trainers(rank.ring.get())[stream.rank], 1, __ATOMIC_SEQ_CST);
    may_wait = !receive_all();  // a sample may have come before its solver could see that this thread waits
  }

  std::vector<pollfd> events{{listener_, POLLIN, 0}, {event_, POLLIN, 0}};
  for (const auto& stranger : strangers_) events.push_back({stranger, POLLIN, 0});
  for (const auto& solver : solvers_)
    for (const auto& rank : solver.ranks) events.push_back({rank.socket, POLLIN, 0});
  if (::poll(events.data(), events.size(), may_wait ? slice_ms : 0) <= 0) return;
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
    if (solver.hello.solver == hello.solver && (solver.hello.id != hello.id || hello.rank >= solver.hello.ranks ||
                                                solver.ranks[static_cast<std::size_t>(hello.rank)].socket >= 0))
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
  const Lock lock(mutex);
  auto solver = std::ranges::find_if(solvers_, [&](const Solver& known) { return known.hello.id == hello.id; });
  if (solver == solvers_.end()) {
    solvers_.push_back({.hello = hello, .ranks = std::vector<Rank>(static_cast<std::size_t>(hello.ranks))});
    solver = std::prev(solvers_.end());
    while (live_rank_of(solver->seq, hello.solver, stream.ranks) != stream.rank) ++solver->seq;
  }
  solver->ranks[static_cast<std::size_t>(hello.rank)].socket = std::move(socket);
}

/// Reads a ring, or a byte that has only woken this thread, or the end of the connection.
void Receiver::read_from(Solver& solver, Rank& rank) {
  for (;;) {
    char byte = 0;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    iovec data{&byte, 1};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const auto got = ::recvmsg(rank.socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
      rank.socket = Descriptor();
      if (stream.rank == 0 && rank.ring && __atomic_load_n(&rank.ring->closed, __ATOMIC_ACQUIRE) == 0)
        log::warn(str("live stream \"", stream.name, "\": rank ", &rank - solver.ranks.data(), " of solver ",
                      solver.hello.solver, " has ended without muster_live_close()"));
      return;
    }
    if (const auto* const part = CMSG_FIRSTHDR(&message); part != nullptr && part->cmsg_type == SCM_RIGHTS) {
      int file = -1;
      std::memcpy(&file, CMSG_DATA(part), sizeof file);
      map_ring(solver, rank, Descriptor(file));
    }
  }
}

void Receiver::map_ring(Solver& solver, Rank& rank, Descriptor file) {
  struct stat status {};
  if (rank.ring || ::fstat(file, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(live_ring))) return;
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return;
  const Lock lock(mutex);
  rank.ring = {static_cast<live_ring*>(memory), [bytes](live_ring* ring) { ::munmap(ring, bytes); }};
  if (!is_sound(*rank.ring, status.st_size)) return rank.ring.reset();
  if (std::ranges::all_of(solver.ranks, [](const Rank& each) { return each.ring != nullptr; })) begin(solver);
}

/// All ranks of the solver have declared their blocks. With `mutex` locked.
void Receiver::begin(Solver& solver) {
  const auto& layout = solver.ranks.front().ring->layout;
  if (!reservoir_) make_memory(layout);
  solver.is_ready = true;
  solver.was_refused = !are_same(columns_, columns_of(layout));
  changed.notify_all();
  if (!solver.was_refused) return;
  // Rank 0 last: the solver acts when it sees it there.
  for (auto rank = solver.ranks.rbegin(); rank != solver.ranks.rend(); ++rank) {
    std::snprintf(rank->ring->refusal, sizeof rank->ring->refusal,
                  "its fields and parameters are not those of the stream's first solver. Declare the same in all "
                  "solvers of a stream");
    __atomic_store_n(&rank->ring->refused, 1, __ATOMIC_SEQ_CST);
    wake(*rank);
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
  const auto capacity = options.bytes / sample_bytes,
             needed = validation + std::max<std::int64_t>(share(options.watermark), 1);
  if (capacity < needed) {
    error_ = Error(ExitCode::usage, doing,
                   str("a sample takes ", sample_bytes, " bytes, a rank needs ", needed,
                       " samples for the watermark and validation, and LiveOptions::bytes is ", options.bytes),
                   "Raise bytes, or lower watermark or validation_samples");
    columns_.clear();
    return;
  }
  const auto bytes = static_cast<std::size_t>(capacity * (sample_bytes - bookkeeping));
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    error_ = Error(ExitCode::usage, doing, str(bytes, " bytes cannot be mapped: ", std::strerror(errno)),
                   "Lower LiveOptions::bytes");
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
      ended_sent_.sent += ring.sent;
      ended_sent_.dropped += ring.dropped;
    }
    if (!solver.was_refused) ended_.insert(solver.hello.solver);
    solvers_.erase(solvers_.begin() + (&solver - solvers_.data()));
  }
  changed.notify_all();
}

}  // namespace muster::detail::live
