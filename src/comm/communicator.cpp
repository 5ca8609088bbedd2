#include "muster/communicator.hpp"

#include "base/text.hpp"
#include "comm/channel.hpp"
#include "comm/collectives.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "comm/rendezvous.hpp"
#include "comm/shared_memory.hpp"
#include "watch/record.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

namespace muster {

using detail::comm::Channel;
using detail::comm::check;
using detail::comm::Collectives;
using detail::comm::Dtype;

Communicator::Communicator(std::shared_ptr<Channel> channel) : channel_(std::move(channel)) {}

int Communicator::rank() const noexcept { return channel_->rank; }
int Communicator::size() const noexcept { return channel_->size; }
const Topology& Communicator::topology() const noexcept { return channel_->topology; }

Communicator Communicator::duplicate() const {
  constexpr auto doing = "duplicating a communicator";
  detail::comm::wait_for_all_ranks(*this, doing);
  return channel_->open_part(channel_->all_ranks(), doing);
}

Communicator Communicator::split(int color, int key) const {
  constexpr auto doing = "splitting a communicator";
  if (color < 0)
    throw Error(ExitCode::usage, doing, detail::str("the colour ", color, " is negative"),
                "Give every rank a colour of 0 or more");
  detail::comm::wait_for_all_ranks(*this, doing);
  detail::comm::Handshake handshake(*channel_->transport->collective, doing);
  const auto colors = handshake.all_gather(std::to_string(color)), keys = handshake.all_gather(std::to_string(key));
  std::vector<std::pair<int, int>> part;  // key and rank
  for (std::size_t r = 0; r < colors.size(); ++r)
    if (colors[r] == std::to_string(color)) part.emplace_back(std::stoi(keys[r]), static_cast<int>(r));
  std::ranges::sort(part);
  std::vector<int> ranks;
  for (const auto& [unused, rank] : part) ranks.push_back(rank);
  return channel_->open_part(ranks, doing);
}

namespace {

/// Waits for the request. The request keeps the memory alive: if the wait throws, MPI may still write there later.
void finish(detail::comm::Request request, std::shared_ptr<void> memory) {
  request.keep(std::move(memory));
  request.wait();
}

template <class T>
void reduce_in_place(const Communicator& communicator, std::span<T> values, Dtype type, ReduceOp op) {
  if (!detail::comm::may_be_written_later(communicator, values.data(), values.size_bytes()))
    return Collectives(communicator).all_reduce(values.data(), values.size(), type, op).wait();
  auto memory = std::make_shared<std::vector<T>>(values.begin(), values.end());
  finish(Collectives(communicator).all_reduce(memory->data(), memory->size(), type, op), memory);
  std::copy(memory->begin(), memory->end(), values.begin());
}

}  // namespace

void Communicator::barrier() const { Collectives(*this).barrier().wait(); }

std::string Communicator::broadcast(std::string value, int root) const {
  if (root < 0 || root >= size())
    throw Error(ExitCode::usage, "starting a broadcast", detail::str("there is no rank ", root, " among ", size()),
                "Ranks are those of this communicator, from 0");
  Collectives collectives(*this);
  auto length = std::make_shared<std::int64_t>(static_cast<std::int64_t>(value.size()));
  finish(collectives.broadcast(length.get(), 1, Dtype::i64, root), length);
  auto bytes = std::make_shared<std::string>(std::move(value));
  bytes->resize(static_cast<std::size_t>(*length));
  finish(collectives.broadcast(bytes->data(), bytes->size(), Dtype::u8, root), bytes);
  return std::move(*bytes);
}

// Gathers by reductions, in which each rank has zeros outside of its own part: so the values go through the node's
// shared memory, and travel between nodes only as often as for a reduction, not from each rank to each other rank.
std::vector<std::string> Communicator::all_gather(const std::string& value) const {
  Collectives collectives(*this);
  if (detail::watch::ScopedCallName::name() == nullptr) collectives.set_name("all_gather");
  const auto own = static_cast<std::size_t>(rank());
  auto lengths = std::make_shared<std::vector<std::int64_t>>(static_cast<std::size_t>(size()));
  (*lengths)[own] = static_cast<std::int64_t>(value.size());
  finish(collectives.all_reduce(lengths->data(), lengths->size(), Dtype::i64, ReduceOp::sum), lengths);
  const auto before = [&](std::size_t rank) {
    return static_cast<std::size_t>(
        std::accumulate(lengths->begin(), lengths->begin() + static_cast<long>(rank), std::int64_t{0}));
  };
  auto all = std::make_shared<std::string>(before(lengths->size()), '\0');
  all->replace(before(own), value.size(), value);
  if (!all->empty()) finish(collectives.all_reduce(all->data(), all->size(), Dtype::u8, ReduceOp::bit_or), all);
  std::vector<std::string> values;
  std::size_t first = 0;
  for (const auto length : *lengths) {
    values.push_back(all->substr(first, static_cast<std::size_t>(length)));
    first += static_cast<std::size_t>(length);
  }
  return values;
}

void Communicator::all_reduce(std::span<float> values, ReduceOp op) const {
  reduce_in_place(*this, values, Dtype::f32, op);
}

void Communicator::all_reduce(std::span<double> values, ReduceOp op) const {
  reduce_in_place(*this, values, Dtype::f64, op);
}

void Communicator::all_reduce(std::span<std::int64_t> values, ReduceOp op) const {
  reduce_in_place(*this, values, Dtype::i64, op);
}

double Communicator::all_reduce(double value, ReduceOp op) const {
  all_reduce(std::span(&value, 1), op);
  return value;
}

std::int64_t Communicator::all_reduce(std::int64_t value, ReduceOp op) const {
  all_reduce(std::span(&value, 1), op);
  return value;
}

SharedMemory Communicator::shared_memory(std::size_t bytes) const {
  return {detail::comm::shared_memory(*this, bytes), bytes};
}

}  // namespace muster
