#include "gradients/between_nodes.hpp"

#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/hierarchy.hpp"
#include "group/buffer.hpp"
#include "node/kernels.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// Returns how many chunks of this size are exchanged at a time: enough that the network always has something to do,
/// while a leader has received at most about 64 MiB that are not reduced yet.
std::size_t most_under_way(std::size_t chunk_bytes) {
  return std::clamp<std::size_t>((std::size_t{64} << 20) / chunk_bytes, 2, 8);
}

/// Exchanges of gradients have the second half of the numbers: the sum of the notes uses the same communicator.
constexpr unsigned half = comm::SliceExchange::numbers / 2;

}  // namespace

node::Chunking BetweenNodes::chunking(const Communicator& communicator) {
  const int owners = comm::num_leaders(communicator);
  return {comm::slice_bytes(communicator.topology().num_nodes, owners), owners};
}

BetweenNodes::BetweenNodes(Communicator communicator, node::BucketReduction& reduction,
                           std::optional<at::ScalarType> send_as, Keep keep)
    : communicator_(std::move(communicator)), reduction_(reduction), send_as_(send_as), keep_(std::move(keep)) {
  const auto [bytes, leaders] = chunking(communicator_);
  if (communicator_.rank() == 0)
    log::debug(str("gradients cross ", counted(communicator_.topology().num_nodes, "node"), " in chunks of ",
                   bytes >> 10, " KiB, each from every node to every other, ", most_under_way(bytes),
                   " at a time by each of ", counted(leaders, "leader"), " of a node"));
}

void BetweenNodes::begin(bool left) {
  for (auto& led : led_) led.exchange.reset();
  exchanged_ = ended_ = {};
  left_ = left;
  again_ = false;
  notes_.reset();
}

void BetweenNodes::begin_again() {
  exchanged_ = ended_ = {};
  again_ = true;
}

void BetweenNodes::send(const Notes& notes) {
  notes_ = std::make_shared<Notes>(notes);
  const auto numbers = notes_->numbers();
  summed_ =
      comm::Collectives(communicator_).all_reduce(numbers.data(), numbers.size(), node::Dtype::f32, ReduceOp::sum);
  summed_.keep(notes_);
}

node::Slice BetweenNodes::share_of(const node::BucketReduction::Chunk& chunk) const {
  return comm::leaders_of(communicator_).own_share(chunk.count, reduction_.buckets()[chunk.bucket].type);
}

/// `position` of the chunk among those that this rank leads: the same for the leaders of all nodes.
void BetweenNodes::exchange(Led& led, std::size_t position, const comm::SliceExchange::Slice& slice,
                            comm::SliceExchange::Reduce reduce, comm::SliceExchange::Halves halves) {
  led.event = {.name = "network",
               .track = watch::TraceTrack::network,
               .begin_ns = watch::trace_begin(),
               .number = static_cast<std::int64_t>(led.chunk.bucket),
               .bytes = static_cast<std::int64_t>(slice.count * node::size_of(slice.type))};
  led.exchange = std::make_unique<comm::SliceExchange>(comm::leaders_of(communicator_),
                                                       half + static_cast<unsigned>(position % half), slice,
                                                       std::move(reduce), led.memory, halves);
}

void BetweenNodes::start(const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> data) {
  if (exchanged_.begun == led_.size()) led_.emplace_back();
  const auto position = exchanged_.begun;
  auto& led = led_[position];
  if (again_) {
    ++exchanged_.begun;
    return;
  }
  led.chunk = chunk;
  led.data.assign(data.begin(), data.end());
  led.memory = keep_(chunk.bucket);
  auto type = reduction_.buckets()[chunk.bucket].type;
  auto*& mine = led.data[static_cast<std::size_t>(communicator_.topology().local_rank)];
  auto* sent = mine;
  std::vector<const void*> sources(data.begin(), data.end());
  std::erase(sources, nullptr);
  // A rank that has abandoned the round may have nothing, but the other nodes wait for its part of the exchange.
  if (mine == nullptr || (left_ && data.size() > 1)) {
    const std::shared_ptr<std::byte[]> sum(new std::byte[chunk.count * node::size_of(type)]);
    led.memory = sum;
    sent = sum.get();
    if (mine == nullptr) mine = sent;
  }
  if (data.size() > 1 && !sources.empty()) {
    void* const target = sent;
    node::reduce_arrays(std::span(&target, 1), sources, chunk.count, {.type = type});
  }
  const auto share = share_of(chunk);
  led.share.resize(left_ ? share.count * node::size_of(type) : 0);
  if (!left_) led.share.shrink_to_fit();
  double scale = 1.0 / communicator_.size();
  if (send_as_ && (type == node::Dtype::f32 || type == node::Dtype::f64)) {
    // In half precision it is scaled before it is rounded: a sum may be too large when its average is not.
    const auto real = type == node::Dtype::f32 ? at::kFloat : at::kDouble;
    const auto count = static_cast<std::int64_t>(chunk.count);
    led.wide = at::from_blob(sent, {count}, real);
    led.narrow = (*send_as_ == at::kHalf ? led.wide.mul(std::exchange(scale, 1.0)) : led.wide).to(*send_as_);
    led.memory = std::make_shared<std::pair<std::shared_ptr<void>, at::Tensor>>(led.memory, led.narrow);
    sent = static_cast<std::byte*>(led.narrow.mutable_data_ptr());
    type = *group::dtype_of(*send_as_);
    if (left_) {
      led.wide = at::from_blob(led.share.data(), {static_cast<std::int64_t>(share.count)}, real);
      led.narrow = led.narrow.narrow(0, static_cast<std::int64_t>(share.first), led.wide.numel());
    }
  }
  const comm::SliceExchange::Slice slice{sent, sent, chunk.count, type};
  const node::Reduction reduction{.type = type, .scale = scale};
  if (!left_ || led.narrow.defined())
    exchange(led, position, slice, comm::SliceExchange::sum_of(slice, reduction),
             left_ ? comm::SliceExchange::Halves::reduce : comm::SliceExchange::Halves::both);
  else
    exchange(
        led, position, slice,
        [target = static_cast<void*>(led.share.data()), reduction](const node::Slice& own, auto summands) {
          node::reduce_arrays(std::span(&target, 1), summands, own.count, reduction);
        },
        comm::SliceExchange::Halves::reduce);
  ++exchanged_.begun;
}

/// Called once the averages of the chunk's share are there and the notes are known.
void BetweenNodes::start_end(std::size_t position, const ChunkStep* step) {
  auto& led = led_[position];
  const auto type = reduction_.buckets()[led.chunk.bucket].type;
  const auto mine = share_of(led.chunk);
  auto* result = own(led);
  if (step != nullptr) {
    auto* const averages = led.share.data();
    step->on_chunk({led.chunk.number, led.chunk.bucket, led.chunk.first + mine.first, mine.count},
                   std::span(&averages, 1));
    const auto target = step->result ? step->result(led.chunk) : nullptr;
    led.memory = target;
    result = target.get();
  } else {
    led.memory = keep_(led.chunk.bucket);
    std::ranges::copy(led.share, result + mine.first * node::size_of(type));
  }
  if (result != nullptr)
    exchange(led, position, {result, result, led.chunk.count, type}, nullptr, comm::SliceExchange::Halves::gather);
}

/// Writes the leader's result to the other ranks of its node.
void BetweenNodes::copy_to_node(const Led& led) const {
  const auto bytes = led.chunk.count * node::size_of(reduction_.buckets()[led.chunk.bucket].type);
  for (auto* const other : led.data)
    if (other != nullptr && other != own(led)) std::memcpy(other, own(led), bytes);
}

/// `writes_results`: true if the exchanges leave averages in the leader's gradients.
bool BetweenNodes::advance(Progress& progress, bool writes_results) {
  bool any = false;
  int calls = comm::calls_per_poll;  // one exchange polls the network for all
  for (auto i = progress.finished; i < progress.begun; ++i) {
    auto& led = led_[i];
    if (!led.exchange || !led.exchange->advance(std::exchange(calls, 1))) continue;
    led.exchange.reset();
    watch::record_until_now(led.event);
    if (led.narrow.defined()) led.wide.copy_(led.narrow);
    led.narrow.reset();
    led.wide.reset();
    led.memory = {};
    if (writes_results) copy_to_node(led);
    any = true;
  }
  while (progress.finished < progress.begun && !led_[progress.finished].exchange) ++progress.finished;
  return any;
}

bool BetweenNodes::advance() {
  const at::NoGradGuard no_grad;
  bool any = false;
  while (exchanged_.begun - exchanged_.finished < most_under_way(chunking(communicator_).bytes) &&
         reduction_.next_own([&](const auto& chunk, auto data) { start(chunk, data); }))
    any = true;
  return advance(exchanged_, !left_) || any;
}

bool BetweenNodes::knows_notes() {
  advance();
  return notes_ && summed_.done();
}

/// See finish(); each rank then throws an Error or begins the round again.
bool BetweenNodes::ends_with_nothing() const {
  return !notes_->all_words_equal(communicator_.size()) || (notes_->flags() & gradients_stale) != 0 ||
         notes_->any_abandoned();
}

bool BetweenNodes::finish(const ChunkStep* step) {
  const bool known = knows_notes();
  const bool exchanged = reduction_.gave_all() && exchanged_.begun == exchanged_.finished;
  if (!left_) return exchanged && reduction_.finish() && known;
  if (!known) return false;
  if (ends_with_nothing()) return exchanged && reduction_.finish();
  while (ended_.begun < exchanged_.finished &&
         ended_.begun - ended_.finished < most_under_way(chunking(communicator_).bytes))
    start_end(ended_.begun++, step);
  advance(ended_, step == nullptr);
  return exchanged && ended_.finished == exchanged_.finished && reduction_.finish();
}

}  // namespace muster::detail::gradients
