// A c10d backend over MPI: implements every collective of c10d::Backend, and opens no port.
#pragma once

#include "comm/collectives.hpp"
#include "group/reduction.hpp"
#include "group/work.hpp"
#include "muster/process_group.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::group {

/// The contract. All ranks start the same collectives in the same order, with the same types, counts and options; they
/// may wait for them in any order. Only one thread at a time may start operations and call their Works, and no thread
/// is made, unless the backend is torch.distributed's (torch_backend.hpp). The functions here only start an operation;
/// it advances inside calls on a Work (work.hpp). Do not touch its tensors before it has finished. monitoredBarrier()
/// waits for all ranks before it returns, and so does a reduction of sparse tensors, which first exchanges sizes.
///
/// Any dense tensor can be used: one that is not contiguous, or on a GPU, is copied in and back. Inputs are not
/// written; reduce() writes its tensor only on the root. If c10d takes a list of tensors (allgather, gather, scatter,
/// reduce_scatter, alltoall), their sizes may differ from rank to rank. Half and bfloat16 are reduced in float: in a
/// node's memory all ranks' values at once, with one rounding; by MPI two values at a time, with a rounding each time.
/// Averages of them are sent as float and rounded once, since the sum may be too large for the type. allreduce() sums
/// and averages sparse tensors, too. For anything unsupported, the starting call throws an Error (ExitCode::usage)
/// before anything is sent or written.
class MpiBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  /// `communicator` must serve this backend only. `for_torch`: true for torch.distributed (torch_backend.hpp).
  MpiBackend(Communicator communicator, const ProcessGroupOptions& options, bool for_torch = false);

  const std::string getBackendName() const override { return "muster"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  /// The ranks count from 0 on, so there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  /// The number of collectives that this rank has started.
  std::uint64_t getSequenceNumberForGroup() override { return sequence_number_; }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  /// Returns a vector of `size` elements on the device of `options`. On the CPU, the default, it lies, if possible, in
  /// memory that the ranks of a node share, so all-reduces of it within the node need no copy. For the CPU the call is
  /// collective, unlike torch's.
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;

  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;

  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Started allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Started reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  Started _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  Started reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  Started allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Started _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Started allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  Started allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  Started gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Started scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Started alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Started alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;

  Started send(Tensors& tensors, int to, int tag) override;
  Started recv(Tensors& tensors, int from, int tag) override;
  Started recvAnysource(Tensors& tensors, int tag) override;

  Started barrier(const c10d::BarrierOptions& options) override;
  /// Returns when all ranks have called it. Past the timeout it throws. Rank 0's Error names the first missing rank, or
  /// with `wait_all_ranks` all of them, in the words of torch's gloo. Then do not call it again on this group.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  using Operation = c10::intrusive_ptr<Work>;

  /// Starts the parts that were added to `work`, and returns it.
  Started start(Operation work);
  /// Makes the Work of an operation. `inputs` are only for torch's profiler.
  Operation begin(c10d::OpType type, const char* title, const Tensors& inputs,
                  std::chrono::milliseconds timeout = c10d::kUnsetTimeout, bool is_async = true);
  void prepare(Buffer& buffer, const Reduction& reduction) const;
  void all_reduce(Work& work, const at::Tensor& tensor, const c10d::ReduceOp& op);
  /// Reduces block r of `blocks` onto rank r; this rank's block goes to `output`.
  void reduce_blocks(Work& work, Buffer& output, std::vector<Buffer*> blocks, const c10d::ReduceOp& op);
  void reduce_scatter_even(Work& work, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  void exchange(Work& work, std::vector<comm::Message> sends, std::vector<comm::Message> receives, comm::Dtype type);
  /// Sends `input` of rank r to outputs[r] of every rank.
  void all_gather(Work& work, const Tensors& outputs, const at::Tensor& input);
  void all_gather_even(Work& work, const at::Tensor& output, const at::Tensor& input);
  int checked_rank(const Work& work, int64_t rank) const;
  /// Returns the list. Throws an Error unless it has one entry for every rank.
  const Tensors& one_per_rank(const Work& work, const Tensors& tensors) const;
  /// Returns the messages that send tensors[r] to rank r (Access::read) or receive it from there (Access::write). The
  /// tensors must have the type of `other`, this rank's tensor on the other side, and tensors[rank_] also its size.
  std::vector<comm::Message> messages_of(Work& work, const Tensors& tensors, Access access, const Buffer& other) const;
  std::vector<comm::Message> to_all(const Buffer& buffer) const;

  comm::Collectives collectives_;
  std::optional<std::chrono::milliseconds> timeout_;
  const bool for_torch_;
  std::uint64_t sequence_number_ = 0;
};

}  // namespace muster::detail::group
