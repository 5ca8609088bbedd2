#include "comm/agreement.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/rank_status.hpp"
#include "comm/timeout.hpp"
#include "data/passes/batches.hpp"
#include "data/preprocess/batch_work.hpp"
#include "muster/error.hpp"
#include "watch/trace.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <system_error>
#include <utility>

namespace muster::detail::data {
namespace {

/// How often a wait for a slow reader polls for the failure of another rank.
constexpr std::chrono::milliseconds poll_interval{50};

}  // namespace

Prefetch::Prefetch(Produce produce, int ahead, int threads, std::optional<SlowReader> slow)
    : produce_(std::move(produce)),
      ahead_(static_cast<std::size_t>(ahead)),
      threads_(threads),
      slow_(std::move(slow)),
      workers_("muster-map", threads > 1 ? threads : 0),
      reader_("muster-read", 1) {
  if (ahead_ == 0) return;
  const std::size_t workers = threads > 1 ? static_cast<std::size_t>(threads) : 0;
  if (workers_.start() < workers || reader_.start() == 0)  // the system has no more threads
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  try {
    for (std::size_t worker = 0; worker < workers; ++worker) workers_.add([this] { work_on_batches(); });
    reader_.add([this] { read_batches(); });
  } catch (...) {
    leave();
    throw;
  }
}

Prefetch::~Prefetch() {
  if (slow_) slow_->stop.request_stop();
  leave();
  if (ahead_ > 0 && slow_ && slow_->communicator) end_slow_reader();
}

void Prefetch::leave() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
}

/// Waits until the thread that reads has ended. It cannot be left running, since it may use objects that the program
/// destroys next. If it has not ended after the launch's timeout, ends the job.
void Prefetch::end_slow_reader() {
  const auto timeout = comm::timeout(*slow_->communicator);
  Lock lock(mutex_);
  const auto ended = [this] { return ended_; };
  if (changed_.wait_for(lock, std::min(timeout, poll_interval), ended)) return;
  const comm::WaitingForReader waiting(*slow_->communicator);
  if (changed_.wait_for(lock, timeout, ended)) return;
  const auto seconds = std::to_string(std::chrono::duration<double>(timeout).count());
  comm::give_up(
      *slow_->communicator,
      Error(ExitCode::retry, "leaving a pass over the stream \"" + slow_->dataset + "\"",
            "its reader has not returned within " + seconds.substr(0, seconds.find('.') + 2) + " s" +
                (std::uncaught_exceptions() > 0 ? ", and an exception of the program is held up by that" : ""),
            "Have the reader return when StreamShard::stop asks for it; --timeout sets the limit"));
}

void Prefetch::read_batches() {
  const auto most = ahead_ + static_cast<std::size_t>(threads_) - 1;
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return leaving_ || finished_ || slots_.size() < most; });
    if (leaving_ || finished_) break;
    lock.unlock();
    std::optional<Slot> slot;
    try {
      const watch::TraceSpan span("read batch");
      if (auto batch = produce_()) slot.emplace(Slot{std::move(*batch)});
    } catch (...) {
      slot.emplace(Slot{.read = Batch(), .error = std::current_exception()});
    }
    lock.lock();
    if (!slot || slot->error) finished_ = true;
    if (slot) slots_.push_back(std::move(*slot));
    changed_.notify_all();
    while (threads_ == 1 && work_once(lock)) {
    }
  }
  ended_ = true;
  changed_.notify_all();
}

void Prefetch::work_on_batches() {
  Lock lock(mutex_);
  while (!leaving_)
    if (!work_once(lock)) changed_.wait(lock);
}

/// Does a piece of the work on a batch. Returns false if there is none that may be done now.
bool Prefetch::work_once(Lock& lock) {
  auto* const slot = next_to_work_on();
  if (slot == nullptr) return false;
  slot->in_work = true;
  lock.unlock();
  bool done = true;
  std::exception_ptr error;
  try {
    const watch::TraceSpan span("work on batch");
    done = run_first(slot->read, /*ahead=*/true);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  slot->in_work = false;
  slot->is_left = !done;
  slot->error = error;
  if (done) slot->read.work.pop_front();
  if (error) finished_ = true;
  changed_.notify_all();
  return true;
}

/// The first batch that waits for work which may be done now; null if there is none.
Prefetch::Slot* Prefetch::next_to_work_on() {
  if (leaving_) return nullptr;
  std::size_t most_left = 0;  // the most pieces of work that an earlier batch has left
  for (auto& slot : slots_) {
    if (slot.error) return nullptr;  // the batches after it are not wanted
    if (slot.is_ready()) continue;
    // All batches of a pass have the same work, so the number of pieces left says which one is next.
    const auto left = slot.read.work.size();
    const auto in_same_work = [&](const Slot& other) { return other.in_work && other.read.work.size() == left; };
    const auto threads = slot.read.work.front().threads.value_or(threads_);
    const bool in_turn = threads > 1 || most_left < left;
    if (!slot.in_work && in_turn && std::ranges::count_if(slots_, in_same_work) < threads) return &slot;
    most_left = std::max(most_left, left);
  }
  return nullptr;
}

std::optional<Batch> Prefetch::next() {
  if (leaving_) return {};
  try {
    if (auto read = take()) return finished(std::move(*read));
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return {};
}

std::optional<ReadBatch> Prefetch::take() {
  if (ahead_ == 0) return produce_();
  Lock lock(mutex_);
  wait_for_batch(lock);
  if (slots_.empty()) return {};
  auto slot = std::move(slots_.front());
  slots_.pop_front();
  changed_.notify_all();
  if (slot.error) std::rethrow_exception(slot.error);
  return std::move(slot.read);
}

void Prefetch::wait_for_batch(Lock& lock) {
  const auto there = [this] { return slots_.empty() ? finished_ : slots_.front().is_ready(); };
  if (!slow_ || !slow_->communicator) return changed_.wait(lock, there);
  if (changed_.wait_for(lock, poll_interval, there)) return;
  const comm::WaitingForReader waiting(*slow_->communicator);
  do {
    lock.unlock();
    comm::throw_if_alarm_raised(*slow_->communicator);
    lock.lock();
  } while (!changed_.wait_for(lock, poll_interval, there));
}

}  // namespace muster::detail::data
