#include "checkpoint/background_save.hpp"

#include "comm/make_world.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "watch/trace.hpp"

#include <pthread.h>

#include <chrono>
#include <utility>

namespace muster::detail::checkpoint {
namespace {

/// Stores the time of its destruction in `at`.
struct EndTime {
  Clock::time_point& at;
  ~EndTime() { at = Clock::now(); }
};

}  // namespace

BackgroundSave::~BackgroundSave() {
  if (result_.valid()) result_.wait();
}

void BackgroundSave::enable(const Communicator& ranks) { communicator_ = comm::make_separate_world(ranks); }

void BackgroundSave::run(std::function<void(const Communicator&)> work) {
  const auto attempt = [this, communicator = *communicator_, work = std::move(work)] {
    const EndTime end_time{ended_};
    const watch::TraceSpan span("write checkpoint");
    const auto timeout = comm::timeout(communicator);
    return comm::attempt_on_all(communicator, {.done = timeout, .failed = timeout}, [&] { work(communicator); });
  };
  if (comm::threads_may_call_mpi()) {
    result_ = std::async(std::launch::async, [attempt] {
                ::pthread_setname_np(::pthread_self(), "muster-save");
                return attempt();
              }).share();
  } else {
    std::promise<std::optional<Error>> done;
    done.set_value(attempt());
    result_ = done.get_future().share();
  }
}

bool BackgroundSave::is_running() const {
  return result_.valid() && result_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

std::optional<Error> BackgroundSave::finish() {
  if (!result_.valid()) return {};
  const auto result = std::exchange(result_, {});
  result.wait();
  last_duration_ = ended_ - begun_;
  return result.get();
}

std::optional<Clock::duration> BackgroundSave::current_duration() const {
  if (!result_.valid()) return {};
  return (is_running() ? Clock::now() : ended_) - begun_;
}

}  // namespace muster::detail::checkpoint
