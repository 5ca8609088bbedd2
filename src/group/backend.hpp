// c10d's backend over MPI: every collective of c10d::Backend, no port, no thread.
#pragma once

#include "comm/collectives.hpp"
#include "group/reduction.hpp"
#include "group/work.hpp"
#include "muster/process_group.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::group {

/// The contract. All ranks start the same collectives in the same order, with the same types, counts and options; they
/// may be waited for in any order. One thread at a time starts operations and drives their Works. An operation only
/// starts here: it proceeds inside the Work (see there), whose memory must not be touched before it has finished.
///
/// Any dense tensor will do: one that is not contiguous, or on a GPU, is copied in and back. Inputs are not written;
/// the tensor of reduce() is written on the root alone. Tensors of a list may differ in size from rank to rank where
/// c10d has a list of them (allgather, gather, scatter, reduce_scatter, alltoall). Half and bfloat16 are
/// reduced in float and rounded on each node, or by MPI at every step. Their averages travel as float and are rounded
/// once: a sum may be too large for them. What cannot be done is an Error (ExitCode::usage), raised where it is
/// started, before anything is sent or written.
class Backend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Started = c10::intrusive_ptr<c10d::Work>;

  /// `communicator` is for this backend alone.
  Backend(Communicator communicator, const ProcessGroupOptions& options);

  const std::string getBackendName() const override { return "muster"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  /// A vector of `size` elements on the device of `options`. Without one, and on the CPU, it lies in memory that the
  /// ranks of a node share, so that all-reduces of it inside the node need no copy. Collective, unlike torch's.
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

 private:
  using Operation = c10::intrusive_ptr<Work>;

  /// Starts the parts that were added.
  static Started started(Operation work);
  Operation begin(c10d::OpType type, const char* title, std::chrono::milliseconds limit = c10d::kUnsetTimeout);
  void prepare(Buffer& buffer, const Reduction& reduction) const;
  void all_reduce(Work& work, const at::Tensor& tensor, const c10d::ReduceOp& op);
  /// Block r of `blocks` is reduced onto rank r; this rank's goes to `output`.
  void reduce_blocks(Work& work, Buffer& output, std::vector<Buffer*> blocks, const c10d::ReduceOp& op);
  void reduce_scatter_even(Work& work, const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  void exchange(Work& work, std::vector<comm::Message> sends, std::vector<comm::Message> receives, comm::Dtype type);
  /// `input` of rank r to outputs[r] of every rank.
  void all_gather(Work& work, const Tensors& outputs, const at::Tensor& input);
  void all_gather_even(Work& work, const at::Tensor& output, const at::Tensor& input);
  int checked_rank(const Work& work, int64_t rank) const;
  /// An Error unless the list has an entry for every rank.
  const Tensors& one_per_rank(const Work& work, const Tensors& tensors) const;
  /// To or from rank r what tensors[r] holds, which is like `other`.
  std::vector<comm::Message> messages_of(Work& work, const Tensors& tensors, Access access, const Buffer& other) const;
  std::vector<comm::Message> to_all(const Buffer& buffer) const;

  comm::Collectives collectives_;
  std::optional<std::chrono::milliseconds> timeout_;
};

}  // namespace muster::detail::group
