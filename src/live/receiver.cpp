#include "live/receiver.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "base/thread.hpp"
#include "muster/error.hpp"
#include "run/needs_new_job.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <span>
#include <utility>

namespace muster::detail::live {
namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

std::uint64_t load(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_SEQ_CST); }

std::uint64_t& word_of(live_ring& ring, std::int64_t seq) { return *live_word_of(&ring, seq); }

}  // namespace

std::int64_t first_sample(const Stream& stream, int solver) {
  std::int64_t seq = 0;
  while (live_rank_of(seq, solver, stream.ranks) != stream.rank) ++seq;
  return seq;
}

bool Solver::has_ended() const {
  return has_died || std::ranges::none_of(ranks, [](const auto& rank) { return rank && rank->is_open(); });
}

bool Solver::lacks(int rank) const {
  const auto& connection = ranks[static_cast<std::size_t>(rank)];
  return !connection || !connection->is_open();
}

bool Solver::is_closing() const {
  return has_ended() || std::ranges::any_of(ranks, [](const auto& rank) { return rank && rank->is_closing(); });
}

Receiver::Receiver(Stream of) : stream(std::move(of)), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const auto solvers = static_cast<std::size_t>(stream.options.solvers);
  history_.ended.resize(solvers);
  history_.next.resize(solvers);
  history_.resent_before.resize(solvers);
  transports_.push_back(node_transport(*this));
  if (stream.has_other_nodes) transports_.push_back(mpi_transport(*this));
}

void Receiver::start() {
  for (const auto& transport : transports_) transport->start();
  thread_ = start_thread("muster-live", [this] { run(); });
}

Receiver::~Receiver() {
  {
    const Lock lock(mutex);
    wanted_.is_ending = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  for (auto& solver : solvers_)
    for (const auto& rank : solver.ranks)
      if (rank) rank->leave();
}

void Receiver::wait_for_solver() {
  Lock lock(mutex);
  changed.wait_for(lock, stream.options.timeout, [this] { return memory_.reservoir || has_failed() || all_ended(); });
  check();
  if (memory_.reservoir) return;
  throw Error(ExitCode::retry, "waiting for a solver of the live stream \"" + stream.name + "\"",
              all_ended() ? "all have ended without a sample"
                          : str("none has sent a sample within ", stream.options.timeout.count(), " s"),
              "Start solvers that open a stream of this name in the same job, or raise LiveOptions::timeout");
}

void Receiver::wake() const {
  const std::uint64_t one = 1;
  static_cast<void>(!::write(event_, &one, sizeof one));
}

void Receiver::stop_solvers() {
  {
    const Lock lock(mutex);
    wanted_.stops_solvers = true;
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

void Receiver::send_weights(Connection& rank) {
  const Lock lock(mutex);
  if (weights_.memory) rank.send_weights(weights_);
}

void Receiver::resume() {
  wanted_.is_paused = false;
  if (!std::exchange(wanted_.knows_next, true)) history_.resent_before = history_.next;
  wake();  // there may be room again
}

void Receiver::restore(const Sent& before, const std::vector<std::int64_t>& next_samples) {
  history_.before = before;
  for (std::size_t solver = 0; solver < history_.next.size() && solver < next_samples.size(); ++solver)
    history_.next[solver] = std::max(history_.next[solver], next_samples[solver]);
  history_.resent_before = next_samples;
  history_.resent_before.resize(history_.next.size());
  wanted_.knows_next = true;
  wake();
}

void Receiver::pause(Lock& lock) {
  wanted_.is_paused = true;
  changed.wait(lock, [this] { return !is_copying_; });
}

void Receiver::end_pause() {
  if (std::exchange(wanted_.is_paused, false)) wake();
}

bool Receiver::all_ended() const noexcept {
  return static_cast<int>(history_.died.size()) >= stream.options.solvers && solvers_.empty();
}

std::vector<Sent> Receiver::sent() const {
  auto all = history_.ended;
  for (const auto& solver : solvers_)
    if (solver.is_ready) {
      const auto& ring = solver.ring();
      auto& of_solver = all[static_cast<std::size_t>(solver.hello.solver)];
      of_solver.dropped += __atomic_load_n(&ring.dropped, __ATOMIC_ACQUIRE);  // first: the solver writes it last
      of_solver.sent += __atomic_load_n(&ring.sent, __ATOMIC_RELAXED);
      of_solver.waited_ms += __atomic_load_n(&ring.waited_ms, __ATOMIC_RELAXED);
    }
  return all;
}

void Receiver::run() {
  using namespace std::chrono_literals;
  for (auto last_busy = Clock::now();;) {
    {
      const Lock lock(mutex);
      if (wanted_.is_ending) return;
      tell_solvers();
    }
    const bool has_received = receive_all();
    const auto pause = Clock::now() - last_busy < 200ms ? 50us : 1'000us;
    if (serve(/*may_wait=*/!has_received, pause) || has_received) last_busy = Clock::now();
  }
}

/// Receives what is there, some samples of each solver. False if there is nothing to do until an event.
bool Receiver::receive_all() {
  constexpr int most = 64;
  bool has_done = false;
  for (std::size_t i = 0; i < solvers_.size();) {
    auto& solver = solvers_[i];
    for (std::size_t rank = 0; rank < solver.ranks.size(); ++rank) {
      if (!solver.ranks[rank]) continue;
      has_done = solver.ranks[rank]->receive(solver.seq) || has_done;
      if (!solver.ranks[rank]->has_died() || std::exchange(solver.has_died, true) || stream.rank != 0) continue;
      log::warn(str("live stream \"", stream.name, "\": rank ", rank, " of solver ", solver.hello.solver,
                    " has ended without muster_live_close()"));
    }
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
  for (const auto& rank : std::span(solver.ranks).subspan(1)) {
    const auto is_full = [&] { return load(word_of(*rank->ring, solver.seq)) == live_word(solver.seq, LIVE_FULL); };
    if (is_full()) continue;
    if (rank->is_open() && !solver.has_died) return Step::blocked;
    if (!is_full()) return finish(solver, /*arrived=*/false);  // it may have published its block before it ended
  }
  return finish(solver, /*arrived=*/true);
}

/// Takes the next sample of this rank, if there is one and there is room for it.
Receiver::Step Receiver::claim(Solver& solver) {
  auto& ring = solver.ring();
  auto* word = &word_of(ring, solver.seq);
  auto now = load(*word);
  if (live_seq(now) < solver.seq) return Step::nothing;
  if (live_seq(now) > solver.seq || live_state(now) != LIVE_FULL) {  // the solver has dropped it
    solver.seq += stream.ranks;
    return Step::done;
  }
  const auto number = live_slot(&ring, solver.seq)->number;
  const Lock lock(mutex);
  const bool was_resent = number < history_.resent_before[static_cast<std::size_t>(solver.hello.solver)];
  // Before the first draw or a restore() it is not known which samples are wanted.
  if (wanted_.is_paused || !wanted_.knows_next || (!was_resent && !memory_.reservoir->can_take(number)))
    return Step::blocked;
  if (!__atomic_compare_exchange_n(word, &now, live_word(solver.seq, LIVE_TAKEN), false, __ATOMIC_SEQ_CST,
                                   __ATOMIC_SEQ_CST))
    return Step::done;  // the solver has just dropped it
  solver.is_taking = true;
  solver.number = number;
  solver.slot.reset();
  if (was_resent)
    memory_.reservoir->drop();
  else
    solver.slot = memory_.reservoir->make_room(number);
  return Step::done;
}

Receiver::Step Receiver::finish(Solver& solver, bool arrived) {
  {
    const Lock lock(mutex);
    if (wanted_.is_paused) return Step::blocked;
    is_copying_ = true;
  }
  if (solver.slot && arrived)
    for (const auto& rank : solver.ranks)
      copy_block(rank->ring->layout, live_block(rank->ring.get(), solver.seq), memory_.columns, *solver.slot);
  {
    const Lock lock(mutex);
    if (solver.slot && arrived) memory_.reservoir->fill(*solver.slot, solver.hello.solver, solver.number);
    if (solver.slot && !arrived) memory_.reservoir->give_back(*solver.slot);
    is_copying_ = false;
    auto& after = history_.next[static_cast<std::size_t>(solver.hello.solver)];
    after = std::max(after, solver.number + 1);
  }
  changed.notify_all();
  for (const auto& rank : solver.ranks) {
    __atomic_store_n(&word_of(*rank->ring, solver.seq), live_word(solver.seq, LIVE_EMPTY), __ATOMIC_SEQ_CST);
    rank->wake();
  }
  solver.is_taking = false;
  solver.seq += stream.ranks;
  return Step::done;
}

/// Tells each solver what it does not know yet. With `mutex` locked.
void Receiver::tell_solvers() {
  for (auto& solver : solvers_)
    for (const auto& rank : solver.ranks) {
      if (!rank || !rank->ring) continue;
      auto& told = rank->ring->told;
      if (rank == solver.ranks.front() && told.weights_version < weights_.head.version) {
        __atomic_store_n(&told.weights_version, weights_.head.version, __ATOMIC_SEQ_CST);
        rank->tell();
      }
      if (wanted_.stops_solvers && __atomic_exchange_n(&told.stop, 1, __ATOMIC_SEQ_CST) == 0) rank->tell();
      if (!wanted_.knows_next || stream.rank != 0 || __atomic_load_n(&told.next, __ATOMIC_RELAXED) >= 0) continue;
      __atomic_store_n(&told.next, history_.next[static_cast<std::size_t>(solver.hello.solver)], __ATOMIC_SEQ_CST);
      rank->tell();
    }
}

/// Serves the transports. `may_wait`: waits for an event; `pause`: so long, if one must be polled. False if nothing has
/// happened.
bool Receiver::serve(bool may_wait, std::chrono::microseconds pause) {
  using namespace std::chrono_literals;
  if (may_wait) {
    for (auto& solver : solvers_)
      for (const auto& rank : solver.ranks)
        if (rank && rank->ring) __atomic_store_n(&live_trainers(rank->ring.get())[stream.rank], 1, __ATOMIC_SEQ_CST);
    may_wait = !receive_all();  // a sample may have come before its solver could see that this thread waits
  }
  std::vector<pollfd> events{{event_, POLLIN, 0}};
  std::vector<std::size_t> ends;
  bool must_poll = false;
  for (const auto& transport : transports_) {
    transport->watch(events);
    ends.push_back(events.size());
    must_poll = must_poll || transport->must_be_polled();
  }
  const auto slice = !may_wait ? 0us : must_poll ? pause : 1'000'000us;
  const timespec limit{slice / 1s, slice % 1'000'000us / 1us * 1000};
  ::ppoll(events.data(), events.size(), &limit, nullptr);
  std::uint64_t count = 0;
  if (events.front().revents != 0) static_cast<void>(!::read(event_, &count, sizeof count));
  bool has_served = false;
  std::size_t at = 1;
  for (std::size_t i = 0; i < transports_.size(); at = ends[i++])
    has_served = transports_[i]->serve(std::span<const pollfd>(events).subspan(at, ends[i] - at)) || has_served;
  return has_served;
}

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

void Receiver::add(const live_hello& hello, std::shared_ptr<Connection> rank) {
  const Lock lock(mutex);
  history_.died.erase(hello.solver);  // it comes again
  auto solver = std::ranges::find_if(solvers_, [&](const Solver& known) { return known.hello.id == hello.id; });
  if (solver == solvers_.end()) {
    solvers_.push_back({.hello = hello,
                        .ranks = std::vector<std::shared_ptr<Connection>>(static_cast<std::size_t>(hello.ranks)),
                        .seq = first_sample(stream, hello.solver)});
    solver = std::prev(solvers_.end());
  }
  solver->ranks[static_cast<std::size_t>(hello.rank)] = std::move(rank);
}

void Receiver::take_ring(Connection& rank, std::shared_ptr<live_ring> ring, std::int64_t bytes) {
  const Lock lock(mutex);
  const auto solver = std::ranges::find_if(solvers_, [&](const Solver& known) {
    return std::ranges::any_of(known.ranks, [&](const auto& each) { return each.get() == &rank; });
  });
  if (rank.ring || solver == solvers_.end()) return;
  if (!ring || !is_sound(*ring, bytes, stream.ranks)) {
    log::warn(str("live stream \"", stream.name, "\": the memory of solver ", solver->hello.solver,
                  " cannot be mapped. Lower bytes in its options, or raise the limit on open files (ulimit -n)"));
    return rank.leave();
  }
  rank.ring = std::move(ring);
  if (std::ranges::all_of(solver->ranks, [](const auto& each) { return each && each->ring; })) begin(*solver);
}

/// All ranks of the solver have declared their blocks. With `mutex` locked.
void Receiver::begin(Solver& solver) {
  if (!memory_.reservoir) make_reservoir(solver.ring().layout);
  solver.is_ready = true;
  solver.was_refused = !std::ranges::all_of(
      solver.ranks, [&](const auto& rank) { return memory_.columns == columns_of(rank->ring->layout); });
  changed.notify_all();
  if (!solver.was_refused) {
    __atomic_store_n(&solver.ring().told.accepted, 1, __ATOMIC_SEQ_CST);
    return solver.ranks.front()->tell();
  }
  // Rank 0 last: the solver acts when it sees it there.
  for (auto rank = solver.ranks.rbegin(); rank != solver.ranks.rend(); ++rank) {
    auto& told = (*rank)->ring->told;
    std::snprintf(told.refusal, sizeof told.refusal,
                  "its fields and parameters are not those of the stream's first solver. Declare the same in all "
                  "solvers of a stream");
    __atomic_store_n(&told.refused, 1, __ATOMIC_SEQ_CST);
    (*rank)->tell();
  }
}

/// Makes the memory for samples of this layout. With `mutex` locked.
void Receiver::make_reservoir(const live_layout& layout) {
  const auto doing = "making the memory of the live stream \"" + stream.name + "\"";
  auto columns = columns_of(layout);
  constexpr std::int64_t bookkeeping = 64;
  const auto sample_bytes = live::sample_bytes(columns) + bookkeeping;
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
    return;
  }
  capacity -= ahead;
  const auto bytes = capacity * (sample_bytes - bookkeeping);
  const auto memory = make_memory(columns, capacity);
  if (!memory) {
    error_ = std::make_exception_ptr(Error(ExitCode::usage, doing,
                                           str(bytes, " bytes cannot be mapped: ", std::strerror(errno)),
                                           "Lower LiveOptions::bytes"));
    return;
  }
  memory_.columns = std::move(columns);
  memory_.bytes = memory;
  memory_.reservoir.emplace(Reservoir::Options{.rule = options.rule,
                                               .capacity = capacity,
                                               .validation = validation,
                                               .validation_every = options.validation_every,
                                               .max_uses = options.max_uses,
                                               .seed = stream.seed});
}

/// Notes what an ended solver has sent, and forgets it; if it has died, may end the stream.
void Receiver::end(Solver& solver) {
  {
    const Lock lock(mutex);
    if (solver.is_ready) {
      const auto& ring = solver.ring();
      auto& sent = history_.ended[static_cast<std::size_t>(solver.hello.solver)];
      sent.sent += ring.sent;
      sent.dropped += ring.dropped;
      sent.waited_ms += ring.waited_ms;
    }
    // In another job it may come back.
    if (!solver.has_died || stream.options.connect_file.empty()) history_.died[solver.hello.solver] = solver.has_died;
    const bool ends = solver.has_died && stream.options.on_solver_death == LiveFault::end;
    const auto number = solver.hello.solver;
    for (const auto& rank : solver.ranks)
      if (rank) rank->leave();
    solvers_.erase(solvers_.begin() + (&solver - solvers_.data()));
    const auto has_died = [](const auto& ended) { return ended.second; };
    if (!error_ && (ends || (all_ended() && std::ranges::all_of(history_.died, has_died))))
      error_ = std::make_exception_ptr(
          run::NeedsNewJob(Error(ExitCode::retry, "reading the live stream \"" + stream.name + "\"",
                                 ends ? str("solver ", number, " has ended without muster_live_close()")
                                      : "all solvers have ended without muster_live_close()",
                                 "Look why, and start the job again")));
  }
  changed.notify_all();
}

}  // namespace muster::detail::live
