#include "comm/rank_status.hpp"

#include "base/duration.hpp"
#include "comm/channel.hpp"

#include <algorithm>

namespace muster::detail::comm {

AnsweringThread::AnsweringThread(const Communicator& world) : world_(world) {
  Channel::of(world_)->world->wait_monitor.start_answering();
}
AnsweringThread::~AnsweringThread() { Channel::of(world_)->world->wait_monitor.end_answering(); }

WaitingForReader::WaitingForReader(const Communicator& communicator)
    : communicator_(communicator),
      ticket_(Channel::of(communicator)
                  ->world->wait_monitor.own_record()
                  .calls.begin(0, 0, {.kind = watch::Call::Kind::read_stream}, watch::ScopedCallName::name())) {}
WaitingForReader::~WaitingForReader() {
  Channel::of(communicator_)->world->wait_monitor.own_record().calls.end(ticket_);
}

void note_step(const Communicator& communicator, std::int64_t step, std::int64_t epoch) {
  auto& record = Channel::of(communicator)->world->wait_monitor.own_record();
  record.step.store(step, std::memory_order_relaxed);
  record.epoch.store(epoch, std::memory_order_relaxed);
}

void keep_alive(const Communicator& communicator, std::chrono::milliseconds time) {
  const auto end = watch::now() + std::max(usable_timeout(time), std::chrono::milliseconds(0));
  Channel::of(communicator)->world->wait_monitor.own_record().busy_until = end.count();
}

}  // namespace muster::detail::comm
