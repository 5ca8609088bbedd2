#include "gradients/shared_exchange.hpp"

#include "comm/mpi_threads.hpp"
#include "comm/progress.hpp"
#include "comm/wait.hpp"
#include "group/buffer.hpp"
#include "muster/error.hpp"
#include "watch/trace.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace muster::detail::gradients {
namespace {

/// True if the gradient may be reduced in place: its elements lie in the same order on all ranks, and its memory holds
/// the values themselves, unlike that of conjugate and negative views.
bool same_order(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient.is_conj() || gradient.is_neg()) return false;
  return gradient.strides() == parameter.strides() || (gradient.is_contiguous() && parameter.is_contiguous());
}

bool is_large(const at::Tensor& parameter) {
  return parameter.nbytes() >= GradientAllocator::smallest && parameter.is_non_overlapping_and_dense();
}

/// Returns a bucket for each large gradient, from the last parameter to the first, which is the order expected in the
/// first round; then, for each type, a bucket for all small gradients.
std::vector<std::vector<std::size_t>> members_of_buckets(const std::vector<at::Tensor>& parameters) {
  std::vector<std::vector<std::size_t>> buckets;
  for (std::size_t i = parameters.size(); i-- > 0;)
    if (is_large(parameters[i])) buckets.push_back({i});
  for (auto& small : by_type_and_device(parameters)) {
    std::erase_if(small, [&](std::size_t i) { return is_large(parameters[i]); });
    std::reverse(small.begin(), small.end());
    if (!small.empty()) buckets.push_back(std::move(small));
  }
  return buckets;
}

// Each rank writes one word per gradient, and after them these words: its flags, the word of
// SharedExchange::set_check_word(), and the two halves of its weight.
constexpr std::size_t extra_words = 4;

/// Returns `on_chunk`, extended so that each call is an event in a trace.
node::BucketReduction::OnChunk traced(const char* name, const node::BucketReduction::OnChunk& on_chunk) {
  return [name, on_chunk](const node::BucketReduction::Chunk& chunk, std::span<std::byte* const> data) {
    const watch::TraceSpan span(name, static_cast<std::int64_t>(chunk.bucket));
    on_chunk(chunk, data);
  };
}

}  // namespace

struct SharedExchange::Gradient {
  at::Tensor parameter;
  at::Tensor copy = {};                     ///< in the shared memory; undefined if the gradient itself is reduced
  ParameterUse use = ParameterUse::unused;  ///< in the current round
  std::vector<std::int64_t> strides = {};   ///< of the parameter, when the gradient was added
};

/// A bucket holds one large gradient, which is copied only if it cannot be reduced where it lies (see add()), or all
/// small gradients of one type, which are always copied.
struct SharedExchange::Bucket {
  bool large = false;
  std::size_t offset = 0;  ///< of the copies, in bytes from the start of this rank's part of the region
  bool reserved = false;   ///< true if memory is reserved for the copy of a large gradient
  // In the current round:
  std::size_t missing = 0;         ///< number of gradients not added yet
  std::byte* data = nullptr;       ///< address of the gradients
  std::byte* allocated = nullptr;  ///< the allocator's block that holds a copy; null if none does
  /// Keeps the memory while it is reduced, whatever happens to .grad. One reference to the storage, however many chunks
  /// are under way: see Exchange::holds().
  std::shared_ptr<const c10::Storage> held = {};
};

/// Each rank's part of the region holds, in this order: copies of the small gradients, the allocator's blocks, the
/// allocator's spare blocks, and room for copies of large gradients. Memory for the last two is reserved only when it
/// is needed. There are no blocks if no other rank reads the gradients in this one's memory.
struct SharedExchange::MemoryLayout {
  FlatLayout layout;
  std::vector<Bucket> buckets = {};
  std::vector<node::BucketReduction::Bucket> reduced = {};
  std::vector<at::Tensor> large = {};
  std::size_t allocator_offset = 0;  ///< bytes before the allocator's blocks
  std::size_t reserved = 0;          ///< bytes reserved from the start
  std::size_t bytes = 0;             ///< size of the whole part

  MemoryLayout(const std::vector<at::Tensor>& parameters, bool has_blocks)
      : layout(parameters, members_of_buckets(parameters)) {
    for (const auto& [members, count] : layout.buckets) {
      const auto& first = parameters[members.front()];
      buckets.push_back({.large = is_large(first)});
      reduced.push_back({count, *group::dtype_of(first.scalar_type())});
      if (is_large(first) && has_blocks) large.push_back(first);
    }
    add_room(/*for_large=*/false);
    allocator_offset = bytes;
    bytes += GradientAllocator::bytes(large);
    reserved = bytes;
    bytes += GradientAllocator::spare_bytes(large);
    add_room(/*for_large=*/true);
  }

  void add_room(bool for_large) {
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      if (buckets[b].large != for_large) continue;
      buckets[b].offset = bytes;
      bytes = node::whole_lines(bytes + reduced[b].count * node::size_of(reduced[b].type));
    }
  }
};

std::unique_ptr<SharedExchange> SharedExchange::make(const std::vector<at::Tensor>& parameters,
                                                     const Communicator& communicator, bool progress_thread,
                                                     std::optional<at::ScalarType> send_as) {
  if (communicator.size() == 1 || parameters.empty()) return nullptr;
  for (const auto& parameter : parameters)
    if (!parameter.is_cpu() || !group::dtype_of(parameter.scalar_type())) return nullptr;
  const auto& topology = communicator.topology();
  const bool alone = topology.num_nodes == communicator.size();  // each rank on its node
  MemoryLayout memory(parameters, /*has_blocks=*/!alone);
  const auto control_bytes =
      node::BucketReduction::memory_bytes(topology.local_size, memory.buckets.size(), parameters.size() + extra_words);
  const auto allocate = [&](std::size_t bytes, std::size_t reserved) {
    return alone ? comm::own_region(bytes) : comm::allocate_shared(communicator, bytes, reserved);
  };
  // Each rank computes the sizes from its own parameters, which prepare_model() has found to be the same on all ranks.
  auto control = allocate(control_bytes, control_bytes);
  if (!control) return nullptr;
  auto region = allocate(memory.bytes, memory.reserved);
  if (!region) return nullptr;
  return std::unique_ptr<SharedExchange>(new SharedExchange(
      parameters, std::move(memory), communicator, std::move(*control), std::move(*region), progress_thread, send_as));
}

SharedExchange::SharedExchange(const std::vector<at::Tensor>& parameters, MemoryLayout memory,
                               Communicator communicator, comm::SharedRegion control, comm::SharedRegion region,
                               bool progress_thread, std::optional<at::ScalarType> send_as)
    : Exchange(parameters.size(), communicator.size()),
      communicator_(std::move(communicator)),
      control_(std::move(control)),
      region_(std::move(region)),
      layout_(std::move(memory.layout)),
      buckets_(std::move(memory.buckets)),
      reduction_(control_.region.base, region_.region, region_.local_rank, communicator_.topology().local_size,
                 memory.reduced, parameters.size() + extra_words,
                 communicator_.topology().num_nodes > 1 ? BetweenNodes::chunking(communicator_) : node::Chunking()),
      average_(traced("reduce bucket", node::in_place_sum(memory.reduced, 1.0 / communicator_.size()))) {
  for (const auto& parameter : parameters) gradients_.push_back({parameter});
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].large) continue;
    const auto& [members, count] = layout_.buckets[b];
    buckets_[b].data = region_.data() + buckets_[b].offset;
    const auto flat = at::from_blob(buckets_[b].data, {static_cast<std::int64_t>(count)},
                                    parameters[members.front()].options().requires_grad(false));
    for (const auto i : members) gradients_[i].copy = view_like(parameters[i], flat, layout_.slices[i].first_element);
  }
  if (!memory.large.empty())
    allocator_ =
        std::make_unique<GradientAllocator>(region_.data() + memory.allocator_offset, memory.large, region_.segment,
                                            [region = region_](std::byte* first, std::size_t bytes) {
                                              try {
                                                region.reserve(static_cast<std::size_t>(first - region.data()), bytes);
                                                return true;
                                              } catch (const Error&) {
                                                return false;  // the gradient is copied instead
                                              }
                                            });
  if (communicator_.topology().num_nodes == 1) {
    if (progress_thread)
      thread_ =
          std::make_unique<ProgressThread>([this, average = average_] { return reduction_.process_chunk(average); });
    return;
  }
  nodes_ = std::make_unique<BetweenNodes>(
      communicator_, reduction_, send_as, [this](std::size_t bucket) -> std::shared_ptr<void> {
        return std::make_shared<std::pair<node::Region, std::shared_ptr<const c10::Storage>>>(region_.region,
                                                                                              buckets_[bucket].held);
      });
  if (progress_thread && comm::threads_may_call_mpi())
    thread_ = std::make_unique<ProgressThread>([this] {
      try {
        // The round may have no end: the program may call MPI_Finalize() after backward(), or may have caught an error.
        const std::lock_guard lock(comm::operation_mutex());
        return !comm::has_progress_ended() && !failure_ && nodes_->advance();
      } catch (...) {
        failure_ = std::current_exception();
        return false;
      }
    });
}

SharedExchange::~SharedExchange() = default;

void SharedExchange::begin_round() {
  reduction_.begin();
  write_notes();
  if (nodes_) nodes_->begin(arrival_ == Arrival::left || arrival_ == Arrival::left_in_backward);
  failure_ = nullptr;
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b].missing = layout_.buckets[b].members.size();
  for (std::size_t i = 0; i < gradients_.size(); ++i) drop_copy(i);
  if (thread_ && in_backward()) thread_->start();
}

void SharedExchange::add_gradient(std::size_t index, const at::Tensor& gradient, ParameterUse use) {
  const at::NoGradGuard no_grad;
  auto& own = gradients_[index];
  auto& bucket = buckets_[layout_.slices[index].bucket];
  if (bucket.large) {
    auto* const data = gradient.defined() ? static_cast<std::byte*>(gradient.data_ptr()) : nullptr;
    const auto* const begin = region_.data();
    // Other ranks of the node must be able to read it.
    const bool here =
        !allocator_ ? data != nullptr : data >= begin && data + own.parameter.nbytes() <= begin + region_.region.stride;
    // If no rank has used the parameter, its .grad must keep its value, so it must not be reduced in place.
    if (here && use == ParameterUse::used && same_order(gradient, own.parameter)) {
      bucket.data = data;
      bucket.held = std::make_shared<const c10::Storage>(gradient.storage());
    } else if (use == ParameterUse::abandoned) {
      bucket.data = nullptr;  // there may be no memory for it, and nobody reads the averages of this round
    } else {
      bucket.data = room_for_copy(bucket, own.parameter.nbytes());
      own.copy = view_like(
          own.parameter,
          at::from_blob(bucket.data, {own.parameter.numel()}, own.parameter.options().requires_grad(false)), 0);
    }
  }
  if (own.copy.defined()) {
    if (gradient.defined())
      own.copy.copy_(gradient);
    else
      own.copy.zero_();
  }
  own.strides.assign(own.parameter.strides().begin(), own.parameter.strides().end());
  own.use = use;
  reduction_.write_word(index, static_cast<std::uint32_t>(use));
  note_arrival(index, use);
  --bucket.missing;
  announce_complete();
  if (nodes_ && reduction_.announced_all() && arrival_ != Arrival::left_in_backward) nodes_->send(notes_);
  if (nodes_ && !thread_ && in_backward()) nodes_->advance();
}

void SharedExchange::announce_complete() {
  const auto& order = reduction_.order();
  while (!reduction_.announced_all() && buckets_[order[reduction_.own_announced()]].missing == 0)
    reduction_.announce(buckets_[order[reduction_.own_announced()]].data);
}

/// Sets the order of buckets to the order in which the first rank's first complete backward() has completed them.
void SharedExchange::fix_order() {
  // Ranks that have left their gradients to an optimizer do not come here. All ranks of the node read the same notes.
  for (std::size_t i = 0; !nodes_ && i < gradients_.size(); ++i)
    if (user_count(i) < 0) return;
  const auto of_gradients = find_order([&](std::vector<std::int64_t>& own) {
    comm::Collectives(communicator_).broadcast(own.data(), own.size(), comm::Dtype::i64, 0).wait();
  });
  if (of_gradients.empty()) return;
  std::vector<std::size_t> complete(buckets_.size());
  for (std::size_t turn = 0; turn < of_gradients.size(); ++turn)
    complete[layout_.slices[static_cast<std::size_t>(of_gradients[turn])].bucket] = turn;
  auto order = reduction_.order();
  std::ranges::sort(order, {}, [&](std::size_t bucket) { return complete[bucket]; });
  reduction_.reorder(order);
}

/// Takes a free block of the allocator if there is one: the block meant for this gradient is unused. Else takes the
/// room at the end of this rank's part.
std::byte* SharedExchange::room_for_copy(Bucket& bucket, std::size_t bytes) {
  bucket.allocated = allocator_ ? allocator_->allocate(bytes) : nullptr;
  if (bucket.allocated != nullptr) return bucket.allocated;
  if (!bucket.reserved) region_.reserve(bucket.offset, bytes);
  bucket.reserved = true;
  return region_.data() + bucket.offset;
}

void SharedExchange::wait_until(const std::function<bool()>& ready) const {
  comm::wait_on(communicator_, ready, [] { return std::string(averaging); });
}

Flags SharedExchange::agree(Flags mine) {
  const auto all = std::make_shared<Flags>(mine);
  auto request = comm::Collectives(communicator_).all_reduce(all.get(), 1, comm::Dtype::i32, ReduceOp::bit_or);
  request.keep(all);
  wait_until([&] {
    if (nodes_ && !thread_) nodes_->advance();
    return request.done();
  });
  return *all;
}

void SharedExchange::run(const node::BucketReduction::OnChunk& on_chunk, const ChunkStep* step) {
  announce_complete();
  wait_until([&] { return nodes_ ? nodes_->finish(step) : reduction_.advance(on_chunk); });
  for (auto& bucket : buckets_) bucket.held = {};
}

void SharedExchange::stop_thread() {
  if (thread_) thread_->stop();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

bool SharedExchange::go_on(bool valid, Flags flags, std::uint32_t word) {
  stop_thread();
  if (std::exchange(arrival_, Arrival::left) == Arrival::left_in_backward) {
    for (const auto& [parameter, copy, use, strides] : gradients_) valid = valid && parameter.strides() == strides;
    notes_.set_flags(valid ? flags : flags | gradients_stale);
    notes_.set_word(word);
    nodes_->send(notes_);
  }
  wait_until([&] { return nodes_->knows_notes(); });
  if ((nodes_->notes().flags() & gradients_stale) == 0) return true;
  run(average_, nullptr);
  return false;
}

void SharedExchange::finish() {
  stop_thread();
  // If another rank's gradients are stale, it begins again, and ends that round by an Error: only here are none stale.
  while (nodes_ && (arrival_ == Arrival::left || arrival_ == Arrival::left_in_backward) &&
         !go_on(/*valid=*/true, notes_.flags(), notes_.word())) {
    begin(Arrival::left, notes_.flags() & ~gradients_stale, notes_.weight());
    for (std::size_t i = 0; i < gradients_.size(); ++i) add(i, {}, ParameterUse::abandoned);
  }
  run(average_, nullptr);
  if (arrival_ == Arrival::in_backward || arrival_ == Arrival::at_once)
    fix_order();  // a rank that has abandoned the round does not know how others end it
}

void SharedExchange::finish_with(const ChunkStep& step) {
  if (reduction_.is_over()) {
    // This is another call in the same round: begin another reduction of the same gradients.
    reduction_.begin();
    if (nodes_) nodes_->begin_again();
    for (std::size_t i = 0; i < gradients_.size(); ++i)
      reduction_.write_word(i, static_cast<std::uint32_t>(gradients_[i].use));
    write_notes();
  }
  run(step.on_chunk, &step);
}

bool SharedExchange::holds(std::size_t index) const noexcept {
  return buckets_[layout_.slices[index].bucket].held != nullptr;
}

int SharedExchange::user_count(std::size_t index) const {
  if (nodes_) return nodes_->notes().user_count(index);
  int users = 0;
  for (int r = 0; r < communicator_.size(); ++r) {
    const auto use = static_cast<ParameterUse>(reduction_.word(r, index));
    if (use == ParameterUse::abandoned) return -1;
    users += use == ParameterUse::used;
  }
  return users;
}

Flags SharedExchange::flags() const {
  if (nodes_) return nodes_->notes().flags();
  Flags all = 0;
  for (int r = 0; r < communicator_.size(); ++r) all |= reduction_.word(r, gradients_.size());
  return all;
}

void SharedExchange::write_notes() {
  const auto bits = std::bit_cast<std::uint64_t>(notes_.weight());
  reduction_.write_word(gradients_.size(), notes_.flags());
  reduction_.write_word(gradients_.size() + 1, notes_.word());
  reduction_.write_word(gradients_.size() + 2, static_cast<std::uint32_t>(bits));
  reduction_.write_word(gradients_.size() + 3, static_cast<std::uint32_t>(bits >> 32));
}

double SharedExchange::mean_weight() const {
  if (nodes_) return nodes_->notes().weight() / communicator_.size();
  double sum = 0;
  for (int r = 0; r < communicator_.size(); ++r)
    sum += std::bit_cast<double>(std::uint64_t{reduction_.word(r, gradients_.size() + 3)} << 32 |
                                 reduction_.word(r, gradients_.size() + 2));
  return sum / communicator_.size();
}

at::IntArrayRef SharedExchange::strides(std::size_t index) const {
  const auto& gradient = gradients_[index];
  return buckets_[layout_.slices[index].bucket].large ? gradient.parameter.strides() : gradient.copy.strides();
}

void SharedExchange::set_check_word(std::uint32_t word) {
  notes_.set_word(word);
  reduction_.write_word(gradients_.size() + 1, word);
}

bool SharedExchange::all_words_equal() const {
  if (nodes_) return nodes_->notes().all_words_equal(communicator_.size());
  for (int r = 0; r < communicator_.size(); ++r)
    if (reduction_.word(r, gradients_.size() + 1) != notes_.word()) return false;
  return true;
}

void SharedExchange::fetch(std::size_t index, at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto& copy = gradients_[index].copy;
  if (!copy.defined()) return;
  copy_or_assign(copy, gradient);
  drop_copy(index);
}

/// Forgets the copy of a large gradient and frees its memory; copies of small gradients stay.
void SharedExchange::drop_copy(std::size_t index) {
  auto& bucket = buckets_[layout_.slices[index].bucket];
  if (!bucket.large) return;
  gradients_[index].copy.reset();
  if (bucket.allocated != nullptr) allocator_->deallocate(std::exchange(bucket.allocated, nullptr));
}

}  // namespace muster::detail::gradients
