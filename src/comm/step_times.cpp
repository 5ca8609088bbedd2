#include "comm/step_times.hpp"

#include "comm/channel.hpp"
#include "watch/time_use.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

namespace muster::detail::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds load_interval{20};
constexpr std::chrono::seconds memory_interval{1};
/// When times of more than this many steps have come from other nodes, rank 0 drops the oldest.
constexpr std::size_t most_received = 1024;

std::int64_t nanoseconds(std::chrono::nanoseconds time) { return time.count(); }

const watch::Record* record_of(const Channel& channel, int rank) {
  return channel.world->wait_monitor.record(channel.world_ranks[static_cast<std::size_t>(rank)]);
}

/// A message consists of 64-bit words.
std::string pack(const std::vector<std::int64_t>& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof words[0]};
}
std::vector<std::int64_t> unpack(const std::string& text) {
  std::vector<std::int64_t> words(text.size() / sizeof(std::int64_t));
  std::memcpy(words.data(), text.data(), words.size() * sizeof words[0]);
  return words;
}

}  // namespace

StepTimes::StepTimes(const Communicator& workers)
    : workers_(workers), attempt_(static_cast<std::uint64_t>(Channel::of(workers)->world->agreements) + 1) {
  const auto& channel = *Channel::of(workers_);
  for (int rank = 0; rank < channel.size; ++rank)
    if (record_of(channel, rank) != nullptr) group_.push_back(rank);
  const auto firsts = workers_.all_gather(std::to_string(group_.front()));
  for (int rank = 1; rank < channel.size; ++rank)
    if (firsts[static_cast<std::size_t>(rank)] == std::to_string(rank)) group_leaders_.push_back(rank);
  if (!group_leaders_.empty()) mailbox_.emplace(workers_);
}

watch::StepSample StepTimes::sample() {
  const auto now = Clock::now();
  if (now - load_read_at_ >= load_interval) {
    load_ = load_reader_.read();
    load_read_at_ = now;
  }
  if (now - memory_read_at_ >= memory_interval) {
    memory_bytes_ = watch::memory_bytes();
    memory_read_at_ = now;
  }
  const auto use = watch::time_use();
  return {.clock_ns = nanoseconds(now.time_since_epoch()),
          .wait_ns = nanoseconds(use.wait),
          .data_ns = nanoseconds(use.data),
          .save_ns = nanoseconds(use.save),
          .save_wait_ns = nanoseconds(use.save_wait),
          .read_ns = nanoseconds(watch::file_read_time()),
          .load = load_,
          .memory_bytes = memory_bytes_};
}

void StepTimes::note(std::int64_t step) {
  Channel::of(workers_)->world->wait_monitor.own_record().steps.write(key_of(step), sample());
  if (mailbox_ && workers_.rank() == group_.front() && workers_.rank() != 0) send_group_samples(step);
}

void StepTimes::send_group_samples(std::int64_t step) {
  const auto& channel = *Channel::of(workers_);
  // This is the first step of the session, or the log no longer holds the step next_to_send_.
  if (next_to_send_ == 0 || step - next_to_send_ >= static_cast<std::int64_t>(watch::StepLog::slots) - 1)
    next_to_send_ = step;
  next_to_send_ = (next_to_send_ + interval_ - 1) / interval_ * interval_;
  if (next_to_send_ > step) return;
  std::vector<std::int64_t> words{static_cast<std::int64_t>(key_of(next_to_send_)), next_to_send_};
  for (const int rank : group_) {
    const auto sample = record_of(channel, rank)->steps.read(key_of(next_to_send_));
    if (!sample) return;  // that rank has not begun it
    words.push_back(rank);
    std::ranges::copy(sample->pack(), std::back_inserter(words));
  }
  mailbox_->send(0, pack(words));
  next_to_send_ += interval_;
  while (const auto text = mailbox_->receive()) interval_ = std::max(interval_, unpack(*text).at(0));
}

void StepTimes::receive() {
  while (const auto text = mailbox_->receive()) {
    const auto words = unpack(*text);
    const auto step = words.at(1);
    if (static_cast<std::uint64_t>(words.at(0)) != key_of(step)) continue;  // of an earlier attempt
    for (std::size_t at = 2; at + watch::StepSample::words < words.size(); at += watch::StepSample::words + 1) {
      std::array<std::int64_t, watch::StepSample::words> values{};
      std::copy_n(words.begin() + static_cast<std::ptrdiff_t>(at) + 1, values.size(), values.begin());
      received_[step][static_cast<int>(words[at])] = watch::StepSample::unpack(values);
    }
  }
  while (received_.size() > most_received) received_.erase(received_.begin());
}

std::optional<std::vector<watch::StepSample>> StepTimes::at(std::int64_t step) {
  const auto& channel = *Channel::of(workers_);
  std::vector<watch::StepSample> samples(static_cast<std::size_t>(channel.size));
  for (const int rank : group_) {
    const auto sample = record_of(channel, rank)->steps.read(key_of(step));
    if (!sample) return {};
    samples[static_cast<std::size_t>(rank)] = *sample;
  }
  if (!mailbox_) return samples;
  receive();
  received_.erase(received_.begin(), received_.lower_bound(step));
  const auto others = received_.find(step);
  if (others == received_.end() || others->second.size() + group_.size() < samples.size()) return {};
  for (const auto& [rank, sample] : others->second) samples[static_cast<std::size_t>(rank)] = sample;
  return samples;
}

void StepTimes::set_interval(std::int64_t interval) {
  interval_ = interval;
  for (const int rank : group_leaders_) mailbox_->send(rank, pack({interval}));
}

}  // namespace muster::detail::comm
