#include "group/mpi_backend.hpp"

#include "base/text.hpp"
#include "comm/wait.hpp"
#include "group/reduction.hpp"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>

namespace muster::detail::group {
namespace {

using comm::Message;

[[noreturn]] void refuse(const Work& work, const std::string& fact, std::string_view remedy) {
  throw Error(ExitCode::usage, work.error_prefix(), fact, remedy);
}

/// Returns a text such as "3 ranks".
std::string ranks_text(int size) { return counted(size, "rank"); }

/// Returns the only entry of a list that c10d provides for several devices per rank.
template <class T>
T& only_entry(const Work& work, std::vector<T>& list) {
  if (list.size() != 1)
    refuse(work, str(list.size(), " tensors or lists of tensors were given instead of one"),
           "Each rank has one device; use the coalesced operations for several tensors");
  return list.front();
}

void check_same_type(const Work& work, const Buffer& a, const Buffer& b) {
  if (a.scalar_type() != b.scalar_type())
    refuse(work, str("the tensors are of ", c10::toString(a.scalar_type()), " and ", c10::toString(b.scalar_type())),
           "Give tensors of one type");
}

void check_count(const Work& work, std::size_t have, std::size_t want, std::string_view what) {
  if (have != want)
    refuse(work, str(what, " has ", have, " elements instead of ", want), "Make the tensors' sizes agree");
}

void check_same_length(const Work& work, std::size_t outputs, std::size_t inputs) {
  if (outputs != inputs) refuse(work, str(outputs, " outputs for ", inputs, " inputs"), "Give as many of each");
}

/// Returns the number of elements to or from each rank. `splits`: rows of the first dimension for each rank; if empty,
/// all ranks have the same number of rows.
std::vector<std::size_t> split_counts(const Work& work, const Buffer& buffer, const std::vector<int64_t>& splits,
                                      int size) {
  if (buffer.memory().dim() == 0)
    refuse(work, "the tensor has no first dimension to split", "Give it one with view(1)");
  const auto rows = buffer.memory().size(0);
  const auto ranks = static_cast<std::size_t>(size);
  if (splits.empty() && rows % size != 0)
    refuse(work, str(rows, " rows do not divide by ", ranks_text(size)), "Give the sizes of the splits");
  const auto parts = splits.empty() ? std::vector<int64_t>(ranks, rows / size) : splits;
  const bool negative = std::any_of(parts.begin(), parts.end(), [](int64_t part) { return part < 0; });
  if (parts.size() != ranks || negative || std::accumulate(parts.begin(), parts.end(), int64_t{0}) != rows)
    refuse(work, str("the splits are not ", size, " sizes that add up to ", rows, " rows"),
           "Give one size for each rank");
  const auto per_row = rows == 0 ? 0 : buffer.count() / static_cast<std::size_t>(rows);
  std::vector<std::size_t> counts;
  for (const auto part : parts) counts.push_back(static_cast<std::size_t>(part) * per_row);
  return counts;
}

/// Cuts the buffer into consecutive messages for rank 0, 1, ….
std::vector<Message> messages(const Buffer& buffer, const std::vector<std::size_t>& counts) {
  std::vector<Message> all;
  std::size_t first = 0;
  for (const auto count : counts) {
    all.push_back(buffer.message(static_cast<int>(all.size()), first, count));
    first += count;
  }
  return all;
}

/// The largest tag for the caller; monitoredBarrier() uses the next two.
int largest_tag() { return comm::Collectives::largest_tag() - 2; }

void check_tag(const Work& work, int tag) {
  const auto largest = largest_tag();
  if (tag < 0 || tag > largest) refuse(work, str("the tag is ", tag), str("Give a tag from 0 to ", largest));
}

}  // namespace

MpiBackend::MpiBackend(Communicator communicator, const ProcessGroupOptions& options, bool for_torch)
    : c10d::Backend(communicator.rank(), communicator.size()),
      collectives_(std::move(communicator), options.chunk),
      timeout_(options.timeout),
      for_torch_(for_torch) {}

MpiBackend::Started MpiBackend::start(Operation work) {
  collectives_.set_name(work->title());
  sequence_number_ = work->getSequencenumber();
  work->start();
  return work;
}

MpiBackend::Operation MpiBackend::begin(c10d::OpType type, const char* title, const Tensors& inputs,
                                        std::chrono::milliseconds timeout, bool is_async) {
  const auto own = timeout > kNoTimeout ? std::optional(timeout) : timeout_;
  return c10::make_intrusive<Work>(rank_,
                                   Work::Options{.type = type,
                                                 .title = title,
                                                 .timeout = own,
                                                 .sequence_number = sequence_number_ + (c10d::isP2POp(type) ? 0 : 1),
                                                 .for_torch = for_torch_,
                                                 .is_async = is_async},
                                   inputs);
}

int MpiBackend::checked_rank(const Work& work, int64_t rank) const {
  if (rank < 0 || rank >= size_)
    refuse(work, str("there is no rank ", rank, " among ", size_), "Give a rank of this group, counted from 0");
  return static_cast<int>(rank);
}

const MpiBackend::Tensors& MpiBackend::one_per_rank(const Work& work, const Tensors& tensors) const {
  if (tensors.size() != static_cast<std::size_t>(size_))
    refuse(work, str(tensors.size(), " tensors for ", ranks_text(size_)), "Give one for each rank");
  return tensors;
}

std::vector<Message> MpiBackend::messages_of(Work& work, const Tensors& tensors, Access access,
                                             const Buffer& other) const {
  std::vector<Message> all;
  for (const auto& tensor : one_per_rank(work, tensors)) {
    const auto rank = static_cast<int>(all.size());
    const auto& mine = work.keep_buffer(tensor, access);
    const auto& out = access == Access::write ? mine : other;
    const auto& in = access == Access::write ? other : mine;
    check_same_type(work, out, in);
    if (rank == rank_) check_count(work, out.count(), in.count(), "the output of this rank");
    all.push_back(mine.message(rank));
  }
  return all;
}

std::vector<Message> MpiBackend::to_all(const Buffer& buffer) const {
  std::vector<Message> all;
  for (int r = 0; r < size_; ++r) all.push_back(buffer.message(r));
  return all;
}

at::Tensor MpiBackend::allocateTensor(long size, at::TensorOptions options) {
  // supportsTensorAlloc() gets only a device's index, not its type, so it cannot refuse GPUs.
  if (!options.device().is_cpu()) return at::empty({size}, options);
  const auto bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  const auto memory = collectives_.communicator().shared_memory(bytes);
  return at::from_blob(
      memory.data(), {size}, [memory](void*) {}, options);
}

MpiBackend::Started MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto work = begin(c10d::OpType::BROADCAST, "muster:broadcast", tensors, options.timeout, options.asyncOp);
  const int root = checked_rank(*work, options.rootRank);
  const auto& buffer =
      work->keep_buffer(only_entry(*work, tensors), rank_ == root ? Access::read : Access::write, true);
  work->add([this, &buffer, root] {
    const auto message = buffer.message(root);
    return collectives_.broadcast(message.data, message.count, buffer.wire_type(), root);
  });
  return start(std::move(work));
}

// Reductions.

/// Multiplies by the factor of PREMUL_SUM; for AVG, makes the buffer's finish() divide the sum.
void MpiBackend::prepare(Buffer& buffer, const Reduction& reduction) const {
  if (reduction.factor) buffer.scale(*reduction.factor);
  if (reduction.average) buffer.average_over(size_);
}

void MpiBackend::all_reduce(Work& work, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  auto& buffer = work.keep_buffer(tensor, Access::update);
  const auto reduction = reduction_of(op, buffer.scalar_type(), work.error_prefix());
  work.add([this, &buffer, reduction] {
    prepare(buffer, reduction);
    return collectives_.all_reduce(buffer.data(), buffer.count(), buffer.wire_type(), reduction.op);
  });
}

MpiBackend::Started MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  auto work = begin(c10d::OpType::ALLREDUCE, "muster:all_reduce", tensors, options.timeout, options.asyncOp);
  all_reduce(*work, only_entry(*work, tensors), options.reduceOp);
  return start(std::move(work));
}

// Each rank gets the entries of all ranks and adds them up. First the ranks learn how many entries each of them has.
MpiBackend::Started MpiBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  constexpr auto title = "muster:sparse_all_reduce";
  const auto checked = begin(c10d::OpType::_ALLREDUCE_SPARSE, title, tensors, options.timeout, options.asyncOp);
  auto tensor = only_entry(*checked, tensors);
  const bool is_average = options.reduceOp == c10d::ReduceOp::AVG;
  if (!tensor.defined() || !tensor.is_sparse())
    refuse(*checked, "the tensor is not sparse in coordinates", "Use to_sparse_coo()");
  if (!is_average && options.reduceOp != c10d::ReduceOp::SUM)
    refuse(*checked, "sparse tensors have no such reduction", "Use SUM or AVG, or to_dense()");
  reduction_of(options.reduceOp, tensor.scalar_type(), checked->error_prefix());

  const at::NoGradGuard no_grad;
  const auto own = tensor.detach().cpu().coalesce();
  const auto indices = own._indices().t().contiguous(), values = own._values().contiguous();
  const auto shape = c10::str(own.sizes(), " of ", own.scalar_type(), " with ", own.sparse_dim(), " sparse dimensions");
  Tensors mine{at::tensor({values.size(0), static_cast<std::int64_t>(std::hash<std::string>()(shape))}, at::kLong)};
  std::vector<Tensors> all(1);
  for (int r = 0; r < size_; ++r) all[0].push_back(at::empty_like(mine[0]));
  allgather(all, mine, {.timeout = options.timeout, .asyncOp = false})->wait();
  Tensors all_indices, all_values;
  for (const auto& of_rank : all[0]) {
    if (of_rank[1].item<std::int64_t>() != mine[0][1].item<std::int64_t>())
      refuse(*checked, "the ranks' tensors differ from this rank's, which is " + shape,
             "Give tensors of one shape and type on all ranks");
    const auto count = of_rank[0].item<std::int64_t>();
    auto value_sizes = values.sizes().vec();
    value_sizes[0] = count;
    all_indices.push_back(at::empty({count, indices.size(1)}, indices.options()));
    all_values.push_back(at::empty(value_sizes, values.options()));
  }
  auto work = begin(c10d::OpType::_ALLREDUCE_SPARSE, title, tensors, options.timeout, options.asyncOp);
  all_gather(*work, all_indices, indices);
  all_gather(*work, all_values, values);
  work->finish_by(
      [=, size = size_] {
        const at::NoGradGuard none;
        const auto type = own.scalar_type();
        const auto every = at::cat(all_values).to(at::toOpMathType(type));
        auto sum = at::sparse_coo_tensor(at::cat(all_indices).t(), every, own.sizes()).coalesce();
        if (is_average) sum = sum / size;
        tensor.copy_(sum.to(type));
      },
      tensor);
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto work = begin(c10d::OpType::ALLREDUCE_COALESCED, "muster:all_reduce_coalesced", tensors, options.timeout,
                    options.asyncOp);
  for (const auto& tensor : tensors) all_reduce(*work, tensor, options.reduceOp);
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto work = begin(c10d::OpType::REDUCE, "muster:reduce", tensors, options.timeout, options.asyncOp);
  const int root = checked_rank(*work, options.rootRank);
  auto& buffer = work->keep_buffer(only_entry(*work, tensors), rank_ == root ? Access::update : Access::read, true);
  const auto reduction = reduction_of(options.reduceOp, buffer.scalar_type(), work->error_prefix());
  work->add([this, &buffer, reduction, root] {
    prepare(buffer, reduction);
    return collectives_.reduce(buffer.data(), buffer.count(), buffer.wire_type(), reduction.op, root);
  });
  return start(std::move(work));
}

void MpiBackend::reduce_blocks(Work& work, Buffer& output, std::vector<Buffer*> blocks, const c10d::ReduceOp& op) {
  const auto reduction = reduction_of(op, output.scalar_type(), work.error_prefix());
  for (const auto* block : blocks) check_same_type(work, output, *block);
  const auto* mine = blocks[static_cast<std::size_t>(rank_)];
  check_count(work, output.count(), mine->count(), "the output");
  for (int r = 0; r < size_; ++r)
    work.add([this, &output, mine, r, block = blocks[static_cast<std::size_t>(r)], reduction] {
      auto& reduced = r == rank_ ? output : *block;
      if (r == rank_) {
        // Inputs must not be written, so this rank's block is reduced in the output.
        const at::NoGradGuard no_grad;
        output.memory().view(-1).copy_(mine->memory().view(-1));
      }
      prepare(reduced, reduction);
      return collectives_.reduce(reduced.data(), reduced.count(), reduced.wire_type(), reduction.op, r);
    });
}

MpiBackend::Started MpiBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  auto work = begin(c10d::OpType::REDUCE_SCATTER, "muster:reduce_scatter", inputs.empty() ? Tensors() : inputs.front(),
                    options.timeout, options.asyncOp);
  const auto& tensors = one_per_rank(*work, only_entry(*work, inputs));
  auto& output = work->keep_buffer(only_entry(*work, outputs), Access::write);
  std::vector<Buffer*> blocks;
  for (const auto& tensor : tensors) blocks.push_back(&work->keep_buffer(tensor, Access::read));
  reduce_blocks(*work, output, blocks, options.reduceOp);
  return start(std::move(work));
}

void MpiBackend::reduce_scatter_even(Work& work, const at::Tensor& output, const at::Tensor& input,
                                     const c10d::ReduceOp& op) {
  auto& out = work.keep_buffer(output, Access::write);
  const auto& in = work.keep_buffer(input, Access::read);
  check_count(work, in.count(), out.count() * static_cast<std::size_t>(size_), "the input");
  const auto flat = in.memory().view(-1);
  std::vector<Buffer*> blocks;
  for (int r = 0; r < size_; ++r)
    blocks.push_back(&work.keep_buffer(flat.narrow(0, r * output.numel(), output.numel()), Access::read));
  reduce_blocks(work, out, blocks, op);
}

MpiBackend::Started MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  auto work = begin(c10d::OpType::_REDUCE_SCATTER_BASE, "muster:reduce_scatter_tensor", {input}, options.timeout,
                    options.asyncOp);
  reduce_scatter_even(*work, output, input, options.reduceOp);
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::ReduceScatterOptions& options) {
  auto work = begin(c10d::OpType::COALESCED, "muster:reduce_scatter_tensor_coalesced", inputs, options.timeout,
                    options.asyncOp);
  check_same_length(*work, outputs.size(), inputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) reduce_scatter_even(*work, outputs[i], inputs[i], options.reduceOp);
  return start(std::move(work));
}

// Exchanges.

void MpiBackend::exchange(Work& work, std::vector<Message> sends, std::vector<Message> receives, comm::Dtype type) {
  work.add([this, sends = std::move(sends), receives = std::move(receives), type] {
    return collectives_.all_to_all(sends, receives, type);
  });
}

void MpiBackend::all_gather(Work& work, const Tensors& outputs, const at::Tensor& input) {
  const auto& in = work.keep_buffer(input, Access::read);
  exchange(work, to_all(in), messages_of(work, outputs, Access::write, in), in.wire_type());
}

void MpiBackend::all_gather_even(Work& work, const at::Tensor& output, const at::Tensor& input) {
  const auto& out = work.keep_buffer(output, Access::write);
  const auto& in = work.keep_buffer(input, Access::read);
  check_same_type(work, out, in);
  check_count(work, out.count(), in.count() * static_cast<std::size_t>(size_), "the output");
  const std::vector<std::size_t> even(static_cast<std::size_t>(size_), in.count());
  exchange(work, to_all(in), messages(out, even), in.wire_type());
}

MpiBackend::Started MpiBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  auto work = begin(c10d::OpType::ALLGATHER, "muster:all_gather", inputs, options.timeout, options.asyncOp);
  all_gather(*work, only_entry(*work, outputs), only_entry(*work, inputs));
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  auto work =
      begin(c10d::OpType::_ALLGATHER_BASE, "muster:all_gather_into_tensor", {input}, options.timeout, options.asyncOp);
  all_gather_even(*work, output, input);
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  auto work =
      begin(c10d::OpType::ALLGATHER_COALESCED, "muster:all_gather_coalesced", inputs, options.timeout, options.asyncOp);
  for (const auto& of_rank : outputs) check_same_length(*work, of_rank.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors from_ranks;
    for (const auto& of_rank : outputs) from_ranks.push_back(of_rank[i]);
    all_gather(*work, from_ranks, inputs[i]);
  }
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& options) {
  auto work = begin(c10d::OpType::COALESCED, "muster:all_gather_into_tensor_coalesced", inputs, options.timeout,
                    options.asyncOp);
  check_same_length(*work, outputs.size(), inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) all_gather_even(*work, outputs[i], inputs[i]);
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  auto work = begin(c10d::OpType::GATHER, "muster:gather", inputs, options.timeout, options.asyncOp);
  const int root = checked_rank(*work, options.rootRank);
  const auto& in = work->keep_buffer(only_entry(*work, inputs), Access::read);
  std::vector<Message> receives;
  if (rank_ == root) receives = messages_of(*work, only_entry(*work, outputs), Access::write, in);
  exchange(*work, {in.message(root)}, receives, in.wire_type());
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  auto work = begin(c10d::OpType::SCATTER, "muster:scatter", inputs.empty() ? Tensors() : inputs.front(),
                    options.timeout, options.asyncOp);
  const int root = checked_rank(*work, options.rootRank);
  const auto& out = work->keep_buffer(only_entry(*work, outputs), Access::write);
  std::vector<Message> sends;
  if (rank_ == root) sends = messages_of(*work, only_entry(*work, inputs), Access::read, out);
  exchange(*work, sends, {out.message(root)}, out.wire_type());
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto work = begin(c10d::OpType::ALLTOALL, "muster:all_to_all", inputs, options.timeout, options.asyncOp);
  one_per_rank(*work, outputs);
  one_per_rank(*work, inputs);
  std::vector<Message> sends, receives;
  const Buffer* first = nullptr;
  for (int r = 0; r < size_; ++r) {
    const auto& in = work->keep_buffer(inputs[static_cast<std::size_t>(r)], Access::read);
    const auto& out = work->keep_buffer(outputs[static_cast<std::size_t>(r)], Access::write);
    if (first == nullptr) first = &in;
    check_same_type(*work, *first, in);
    check_same_type(*work, *first, out);
    if (r == rank_) check_count(*work, out.count(), in.count(), "the output of this rank");
    sends.push_back(in.message(r));
    receives.push_back(out.message(r));
  }
  exchange(*work, sends, receives, first->wire_type());
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  auto work = begin(c10d::OpType::ALLTOALL_BASE, "muster:all_to_all", {input}, options.timeout, options.asyncOp);
  const auto& out = work->keep_buffer(output, Access::write);
  const auto& in = work->keep_buffer(input, Access::read);
  check_same_type(*work, out, in);
  const auto out_counts = split_counts(*work, out, output_splits, size_);
  const auto in_counts = split_counts(*work, in, input_splits, size_);
  const auto self = static_cast<std::size_t>(rank_);
  check_count(*work, out_counts[self], in_counts[self], "the output of this rank");
  exchange(*work, messages(in, in_counts), messages(out, out_counts), in.wire_type());
  return start(std::move(work));
}

// Point to point.

MpiBackend::Started MpiBackend::send(Tensors& tensors, int to, int tag) {
  auto work = begin(c10d::OpType::SEND, "muster:send", tensors);
  const auto& buffer = work->keep_buffer(only_entry(*work, tensors), Access::read);
  const auto message = buffer.message(checked_rank(*work, to));
  check_tag(*work, tag);
  work->add(
      [=, this, type = buffer.wire_type()] { return collectives_.send(message.data, message.count, type, to, tag); });
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::recv(Tensors& tensors, int from, int tag) {
  auto work = begin(c10d::OpType::RECV, "muster:recv", tensors);
  const auto& buffer = work->keep_buffer(only_entry(*work, tensors), Access::write);
  const auto message = buffer.message(checked_rank(*work, from));
  check_tag(*work, tag);
  work->add([=, this, type = buffer.wire_type()] {
    return collectives_.receive(message.data, message.count, type, from, tag);
  });
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  auto work = begin(c10d::OpType::RECVANYSOURCE, "muster:recvAnySource", tensors);
  const auto& buffer = work->keep_buffer(only_entry(*work, tensors), Access::write);
  const auto message = buffer.message(rank_);
  check_tag(*work, tag);
  work->add([=, this, type = buffer.wire_type()] {
    return collectives_.receive_any(message.data, message.count, type, tag);
  });
  return start(std::move(work));
}

MpiBackend::Started MpiBackend::barrier(const c10d::BarrierOptions& options) {
  auto work = begin(c10d::OpType::BARRIER, "muster:barrier", {}, options.timeout, options.asyncOp);
  work->add([this] { return collectives_.barrier(); });
  return start(std::move(work));
}

void MpiBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  using namespace std::chrono_literals;
  using Clock = std::chrono::steady_clock;
  constexpr auto doing = "waiting in monitored_barrier";
  const auto timeout = options.timeout < 0ms ? timeout_.value_or(comm::default_timeout) : options.timeout;
  const auto end = Clock::now() + timeout;
  const int has_come = largest_tag() + 1, may_go = largest_tag() + 2;
  const auto message = [&](c10d::OpType type, int other, int tag) {
    auto work = begin(type, "muster:monitored_barrier", {});
    work->add([=, this] {
      return type == c10d::OpType::SEND ? collectives_.send(nullptr, 0, comm::Dtype::u8, other, tag)
                                        : collectives_.receive(nullptr, 0, comm::Dtype::u8, other, tag);
    });
    start(work)->wait(std::max(1ms, std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now())));
  };
  if (rank_ != 0) try {
      message(c10d::OpType::SEND, 0, has_come);
      return message(c10d::OpType::RECV, 0, may_go);
    } catch (const std::exception&) {
      throw Error(ExitCode::retry, doing,
                  str("Rank ", rank_, " successfully reached monitoredBarrier, but received errors while ",
                      "waiting for send/recv from rank 0"),
                  "Rank 0 says which rank has not come");
    }
  std::string late;
  for (int r = 1; r < size_ && (late.empty() || wait_all_ranks); ++r) {
    if (!wait_all_ranks && Clock::now() >= end)
      throw Error(ExitCode::retry, doing, str("Rank 0 timed out in monitoredBarrier after ", timeout.count(), " ms"),
                  "Give it more time");
    try {
      message(c10d::OpType::RECV, r, has_come);
    } catch (const std::exception&) {
      late += str(late.empty() ? "" : ", ", r);
    }
  }
  if (!late.empty())
    throw Error(ExitCode::retry, doing,
                str("[Rank 0]: ", wait_all_ranks ? "Ranks " : "Rank ", late, " failed to pass monitoredBarrier in ",
                    timeout.count(), " ms"),
                "A rank is stuck, lost or in another collective");
  for (int r = 1; r < size_; ++r) message(c10d::OpType::SEND, r, may_go);
}

}  // namespace muster::detail::group
