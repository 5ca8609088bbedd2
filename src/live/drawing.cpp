#include "base/text.hpp"
#include "live/state.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

namespace muster::detail::live {
namespace {

using Lock = std::unique_lock<std::mutex>;

/// The values of these samples. With the receiver's mutex locked.
Batch rows_of(Receiver& receiver, const std::vector<std::int64_t>& slots) {
  const auto rows = static_cast<std::int64_t>(slots.size());
  std::vector<Batch::Item> items;
  for (const auto& column : receiver.columns()) {
    const auto values = at::empty(shape_of(column, rows), type_of(column));
    auto* to = static_cast<std::byte*>(values.mutable_data_ptr());
    for (const auto slot : slots) {
      std::memcpy(to, column.data + slot * column.bytes, static_cast<std::size_t>(column.bytes));
      to += column.bytes;
    }
    items.emplace_back(column.name, values);
  }
  const auto samples = at::empty({rows, 2}, at::kLong);
  auto* at = samples.mutable_data_ptr<std::int64_t>();
  for (const auto slot : slots) {
    *at++ = receiver.reservoir()[slot].solver;
    *at++ = receiver.reservoir()[slot].number;
  }
  items.emplace_back("sample", samples);
  return Batch(std::move(items));
}

std::optional<Batch> joined(std::vector<Batch>& parts) {
  if (parts.size() < 2) return parts.empty() ? std::nullopt : std::optional(std::move(parts.front()));
  std::vector<Batch::Item> items;
  for (const auto& [name, unused] : parts.front()) {
    std::vector<at::Tensor> values;
    for (const auto& part : parts) values.push_back(part[name]);
    items.emplace_back(name, at::cat(values));
  }
  return Batch(std::move(items));
}
/// Waits until `ready`, or the stream has failed, with the lock held. False if no sample has come in time. Calls
/// `between` from time to time, without the lock.
bool wait(LiveState& state, Lock& lock, const std::function<void()>& between, const auto& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds slice{50};
  auto& receiver = state.receiver;
  const auto begin = Clock::now();
  auto last_change = begin;
  for (auto came = receiver.reservoir().fates().received; !receiver.has_failed() && !ready();) {
    receiver.changed.wait_for(lock, slice);
    if (std::exchange(came, receiver.reservoir().fates().received) != came) last_change = Clock::now();
    if (Clock::now() - last_change > state.options.timeout) return false;
    lock.unlock();
    between();
    lock.lock();
  }
  state.wait_s += std::chrono::duration<double>(Clock::now() - begin).count();
  return true;
}
/// Throws the Error after a wait: the stream's, or that no sample has come.
void check_wait(const LiveState& state, bool has_come) {
  state.receiver.check();
  if (!has_come)
    throw Error(ExitCode::retry, "reading the live stream \"" + state.receiver.stream.name + "\"",
                str("no sample has come for ", state.options.timeout.count(), " s"),
                "Look whether the solvers still run, or raise LiveOptions::timeout");
}

void wait_for_watermark(LiveState& state, Lock& lock, const std::function<void()>& between) {
  auto& receiver = state.receiver;
  receiver.resume();
  if (state.has_begun) return;
  const auto needed = (state.options.watermark + state.ranks.size() - 1) / state.ranks.size();
  const bool has_come = wait(state, lock, between, [&] {
    return receiver.reservoir().size() >= needed || receiver.reservoir().fates().used > 0 || receiver.all_ended();
  });
  check_wait(state, has_come);
  state.has_begun = true;
}

}  // namespace

at::ScalarType type_of(const LiveColumn& column) {
  constexpr std::array types{at::kFloat, at::kDouble, at::kInt, at::kLong, at::kByte};
  return types[static_cast<std::size_t>(column.type)];
}

std::vector<std::int64_t> shape_of(const LiveColumn& column, std::int64_t rows) {
  auto shape = column.shape;
  shape.insert(shape.begin(), rows);
  return shape;
}

std::int64_t LiveState::draws_left(std::int64_t count) {
  auto& reservoir = receiver.reservoir();
  if (reservoir.size() == 0) return 0;
  const auto share = [&](std::int64_t all) { return all / ranks.size() + (rank() < all % ranks.size() ? 1 : 0); };
  const auto most = options.after_end ? share(*options.after_end) - draws_after_end : reservoir.waiting();
  return std::max<std::int64_t>(0, std::min({count, most, reservoir.uses_once() ? reservoir.waiting() : count}));
}

std::optional<Batch> LiveState::draw(std::int64_t count, const std::function<void()>& between) {
  Lock lock(receiver.mutex);
  wait_for_watermark(*this, lock, between);
  auto& reservoir = receiver.reservoir();
  const auto fresh_share = static_cast<std::int64_t>(std::ceil(options.min_fresh * static_cast<double>(count)));
  std::vector<Batch> parts;
  for (std::int64_t rows = 0; rows < count;) {
    const auto fresh = std::min({fresh_share, count - rows, reservoir.drawable_capacity()});
    const bool has_come = wait(*this, lock, between, [&] {
      return receiver.all_ended() || (reservoir.size() > 0 && reservoir.waiting() >= fresh);
    });
    if (rows == 0) check_wait(*this, has_come);
    if (!has_come || receiver.has_failed()) break;  // what was drawn is used, and the next draw throws
    const bool has_ended = receiver.all_ended();
    auto now = count - rows;
    if (reservoir.uses_once()) now = std::min(now, reservoir.waiting());
    if (has_ended) now = draws_left(now);
    if (now <= 0) break;
    // Each sample is to be used before the end.
    const auto first = has_ended && !options.after_end ? now : fresh;
    const auto slots = reservoir.draw(now, std::min(first, reservoir.waiting()));
    if (slots.empty()) break;
    if (has_ended) draws_after_end += static_cast<std::int64_t>(slots.size());
    parts.push_back(rows_of(receiver, slots));
    rows += static_cast<std::int64_t>(slots.size());
    receiver.resume();
  }
  return joined(parts);
}

std::optional<Batch> LiveState::draw_held_out(std::int64_t count, const std::function<void()>& between) {
  Lock lock(receiver.mutex);
  wait_for_watermark(*this, lock, between);
  if (receiver.reservoir().held_out() == 0) return {};
  return rows_of(receiver, receiver.reservoir().next_held_out(count));
}

Batch LiveState::look(std::span<const std::int64_t> indices, bool of_validation) {
  Lock lock(receiver.mutex);
  wait_for_watermark(*this, lock, [] {});
  const auto& reservoir = receiver.reservoir();
  const auto count = of_validation ? reservoir.held_out() : reservoir.size();
  if (count == 0)
    throw Error(ExitCode::data, "reading the live stream \"" + receiver.stream.name + "\"",
                "no sample is there to look at", "Look at samples while solvers send them");
  std::vector<std::int64_t> slots;
  for (const auto index : indices)
    slots.push_back(of_validation ? reservoir.held_out_slots()[static_cast<std::size_t>(index % count)]
                                  : reservoir.slot(index % count));
  return rows_of(receiver, slots);
}

}  // namespace muster::detail::live
