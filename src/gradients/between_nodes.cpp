#include "gradients/between_nodes.hpp"

#include "comm/hierarchy.hpp"
#include "group/buffer.hpp"
#include "node/kernels.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>

#include <cstring>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// Enough that the network always has something to do.
constexpr std::size_t most_under_way = 8;

}  // namespace

node::Chunking BetweenNodes::chunking(const Communicator& communicator) {
  const int owners = comm::num_leaders(communicator);
  return {comm::slice_bytes(communicator.topology().num_nodes, owners), owners};
}

BetweenNodes::BetweenNodes(Communicator communicator, node::BucketReduction& reduction, std::size_t parameters,
                           std::optional<at::ScalarType> send_as, Keep keep)
    : communicator_(std::move(communicator)),
      reduction_(reduction),
      send_as_(send_as),
      keep_(std::move(keep)),
      notes_(new std::vector<float>(parameters + note_count)) {}

void BetweenNodes::begin(Flags flags, double weight) {
  under_way_.clear();
  // A sum that a failed round has left may still be written to.
  if (summed_.pending()) notes_ = std::make_shared<std::vector<float>>(notes_->size());
  summed_ = {};
  put_notes(flags, weight, std::span(*notes_).last(note_count));
  missing_ = notes_->size() - note_count;
}

void BetweenNodes::note(std::size_t index, ParameterUse use) {
  (*notes_)[index] = summand_of(use);
  if (--missing_ > 0) return;
  summed_ =
      comm::Collectives(communicator_).all_reduce(notes_->data(), notes_->size(), node::Dtype::f32, ReduceOp::sum);
  summed_.keep(notes_);
}

void BetweenNodes::start(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> data) {
  auto type = reduction_.buckets()[chunk.bucket].type;
  auto* const own = data[static_cast<std::size_t>(communicator_.topology().local_rank)];
  if (data.size() > 1) {
    const std::vector<const void*> sources(data.begin(), data.end());
    void* const target = own;
    node::reduce_arrays(std::span(&target, 1), sources, chunk.count, {.type = type});
  }
  auto& started = under_way_.emplace_back();
  started.data.assign(data.begin(), data.end());
  started.bytes = chunk.count * node::size_of(type);
  started.memory = keep_(chunk.bucket);
  auto* sent = own;
  double scale = 1.0 / communicator_.size();
  if (send_as_ && (type == node::Dtype::f32 || type == node::Dtype::f64)) {
    // In half precision it is scaled before it is rounded: a sum may be too large when its average is not.
    const auto count = static_cast<std::int64_t>(chunk.count);
    started.wide = at::from_blob(own, {count}, type == node::Dtype::f32 ? at::kFloat : at::kDouble);
    started.narrow =
        (*send_as_ == at::kHalf ? started.wide.mul(std::exchange(scale, 1.0)) : started.wide).to(*send_as_);
    started.memory = std::make_shared<std::pair<std::shared_ptr<void>, at::Tensor>>(started.memory, started.narrow);
    sent = static_cast<std::byte*>(started.narrow.mutable_data_ptr());
    type = *group::dtype_of(*send_as_);
  }
  const comm::SliceExchange::Slice slice{sent, sent, chunk.count, type};
  started.event = {.name = "network",
                   .track = watch::TraceTrack::network,
                   .begin_ns = watch::trace_begin(),
                   .number = static_cast<std::int64_t>(chunk.bucket),
                   .bytes = static_cast<std::int64_t>(chunk.count * node::size_of(type))};
  // The second half of the numbers: the sum of the notes uses the same communicator.
  constexpr unsigned half = comm::SliceExchange::numbers / 2;
  started.exchange = std::make_unique<comm::SliceExchange>(
      comm::leaders_of(communicator_), half + static_cast<unsigned>(chunk.number % half), slice,
      comm::SliceExchange::sum_of(slice, {.type = type, .scale = scale}), started.memory);
}

bool BetweenNodes::advance() {
  const at::NoGradGuard no_grad;
  bool any = false;
  while (under_way_.size() < most_under_way &&
         reduction_.next_own([&](const auto& chunk, auto data) { start(chunk, data); }))
    any = true;
  int calls = comm::calls_per_poll;  // one exchange polls the network for all
  for (auto& chunk : under_way_) {
    if (!chunk.exchange || !chunk.exchange->advance(std::exchange(calls, 1))) continue;
    chunk.exchange.reset();
    watch::record_until_now(chunk.event);
    if (chunk.narrow.defined()) chunk.wide.copy_(chunk.narrow);
    const auto* const own = chunk.data[static_cast<std::size_t>(communicator_.topology().local_rank)];
    for (auto* const other : chunk.data)
      if (other != own) std::memcpy(other, own, chunk.bytes);
    any = true;
  }
  while (!under_way_.empty() && !under_way_.front().exchange) under_way_.pop_front();
  return any;
}

bool BetweenNodes::finish() {
  advance();
  return reduction_.gave_all() && under_way_.empty() && reduction_.finish() && summed_.done();
}

}  // namespace muster::detail::gradients
