#include "gradients/prepared_model.hpp"

#include "base/log.hpp"
#include "comm/on_ranks.hpp"
#include "gradients/alone_exchange.hpp"
#include "gradients/bucket_exchange.hpp"
#include "gradients/comm_hooks.hpp"
#include "gradients/hooks.hpp"
#include "gradients/module_signature.hpp"
#include "gradients/ordered_exchange.hpp"
#include "gradients/reducer.hpp"
#include "gradients/shared_exchange.hpp"
#include "gradients/sparse_exchange.hpp"
#include "gradients/sync_batch_norm.hpp"
#include "muster/error.hpp"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace muster::detail::gradients {
namespace {

constexpr const char* preparing = "preparing the model";

void require_unprepared(const torch::nn::Module& module) {
  for (const auto& parameter : module.named_parameters()) {
    const auto found = hook_state(parameter.value());
    if (found == ExistingHook::prepared)
      throw Error(ExitCode::data, preparing, "parameter " + parameter.key() + " is prepared already",
                  "Call prepare_model once, with the module that holds all of them");
    if (found == ExistingHook::foreign)
      throw Error(ExitCode::data, preparing,
                  "parameter " + parameter.key() + " has a post-accumulate-gradient hook, which muster needs itself",
                  "Prepare the model without it");
  }
}

/// Refuses embeddings with max_norm: each rank would scale down the rows that its own batches look up, and the weights
/// would differ.
void require_equal_weights(const torch::nn::Module& module) {
  for (const auto& part : module.named_modules()) {
    const auto* const embedding = part.value()->as<torch::nn::EmbeddingImpl>();
    const auto* const bag = part.value()->as<torch::nn::EmbeddingBagImpl>();
    if ((embedding && embedding->options.max_norm()) || (bag && bag->options.max_norm()))
      throw Error(ExitCode::usage, preparing,
                  (part.key().empty() ? "the model" : part.key()) +
                      " is an embedding with max_norm, whose forward() changes other weights on each rank",
                  "Make it without max_norm, and scale the rows down after the optimizer's step");
  }
}

/// A started collective on the values of a tensor with any strides.
struct Transfer {
  at::Tensor tensor;
  /// Shares the memory of `tensor` if that is contiguous and no conjugate or negative view; else a copy.
  at::Tensor contiguous;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Calls `start` for each tensor to start a collective, then waits for the collectives in this order. A tensor that has
/// two names is transferred once. If elements of a tensor share memory (expand()), they get separate memory first.
template <class Start>
void transfer(const std::vector<at::Tensor>& tensors, Start&& start) {
  const at::NoGradGuard no_grad;
  std::vector<Transfer> transfers;
  std::set<const void*> seen;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      tensor.set_data(tensor.detach().clone(at::MemoryFormat::Contiguous));
    auto values = tensor.detach();
    // torch's dispatcher gives the group a copy of a conjugate or negative view, in which the result would be lost.
    auto contiguous = values.resolve_conj().resolve_neg().contiguous();
    std::vector<at::Tensor> one{contiguous};
    transfers.push_back({values, contiguous, start(one)});
  }
  for (auto& t : transfers) {
    t.work->wait();
    if (!t.tensor.is_same(t.contiguous)) t.tensor.copy_(t.contiguous);
  }
}

void broadcast(c10d::ProcessGroup& group, const std::vector<at::Tensor>& tensors, int root = 0) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  transfer(tensors, [&](std::vector<at::Tensor>& one) { return group.broadcast(one, options); });
}

void average_tensors(c10d::ProcessGroup& group, const std::vector<at::Tensor>& tensors) {
  transfer(tensors, [&](std::vector<at::Tensor>& one) {
    one[0].div_(group.getSize());
    return group.allreduce(one);
  });
}

std::string_view last_part(std::string_view name) { return name.substr(name.rfind('.') + 1); }  // npos + 1 is 0

/// True for a running mean or variance, by the names that batch-norms give them.
bool is_running_statistic(std::string_view name, const at::Tensor& buffer) {
  return (last_part(name) == "running_mean" || last_part(name) == "running_var") &&
         (buffer.is_floating_point() || buffer.is_complex());
}

/// Logs that the sizes of buckets have no effect, if the user has set one.
void log_unused_bucket_sizes(const ModelOptions& options, const char* instead) {
  const ModelOptions defaults;
  if (options.bucket_bytes != defaults.bucket_bytes || options.first_bucket_bytes != defaults.first_bucket_bytes)
    log::info(str("bucket_bytes and first_bucket_bytes have no effect: gradients ", instead));
}

Reducer::MakeExchange exchange_maker(const ParallelContext& context,
                                     const c10::intrusive_ptr<c10d::ProcessGroup>& group, const ModelOptions& options) {
  if (context.share.fixed) {
    if (options.comm_hook)
      throw Error(ExitCode::usage, preparing, "virtual workers sum gradients as they are",
                  "Choose no comm_hook with them");
    log_unused_bucket_sizes(options, "of virtual workers are summed whole, in the order of micro-batches");
    return [group, context](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<Exchange> {
      return std::make_unique<OrderedExchange>(parameters, group, context.share, context.steps);
    };
  }
  // Over nodes, the transport between them sends 16 bits itself.
  std::optional<at::ScalarType> send_as;
  if (const auto* const hook = options.comm_hook.target<SendAs>();
      hook && context.communicator.topology().num_nodes > 1)
    send_as = hook->type;
  std::optional<Communicator> shared_memory;
  if (context.share_memory && (!options.comm_hook || send_as)) shared_memory = context.communicator.duplicate();
  const bool progress_thread = context.communicator.size() > 1 && options.progress_thread.value_or(context.spare_core);
  return [context, shared_memory, group, options, send_as,
          progress_thread](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<Exchange> {
    if (context.communicator.size() == 1 && !options.comm_hook)
      return std::make_unique<AloneExchange>(parameters.size());
    if (shared_memory)
      if (auto exchange = SharedExchange::make(parameters, *shared_memory, progress_thread, send_as)) {
        log_unused_bucket_sizes(options, "are averaged where they lie, in node-shared memory");
        return exchange;
      }
    return std::make_unique<BucketExchange>(parameters, context.communicator, group, options);
  };
}

}  // namespace

/// The values of a module's buffers, separately for each micro-batch of this rank.
class PreparedModel::MicroBatchBuffers {
 public:
  /// Each micro-batch begins with the values that the module has now.
  MicroBatchBuffers(const torch::nn::Module& module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                    const step::MicroBatchShare& share)
      : group_(std::move(group)), share_(share), of_micro_batch_(static_cast<std::size_t>(share.count)) {
    for (const auto& buffer : module.named_buffers()) {
      buffers_.push_back(buffer.value());
      is_statistic_.push_back(is_running_statistic(buffer.key(), buffer.value()));
      for (auto& micro_batch : of_micro_batch_) micro_batch.push_back(buffer.value().clone());
    }
  }

  void load_buffers_of(int micro_batch) {
    const at::NoGradGuard no_grad;
    if (micro_batch == inside_) return;
    // The module's values may have changed since synchronise(), for example by a checkpoint: each micro-batch begins
    // with them.
    if (inside_ < 0)
      for (auto& each : of_micro_batch_) copy(buffers_, each);
    store_current();
    inside_ = micro_batch;
    copy(of_micro_batch_[static_cast<std::size_t>(micro_batch)], buffers_);
  }

  void synchronise() {
    const at::NoGradGuard no_grad;
    store_current();
    inside_ = -1;
    for (std::size_t b = 0; b < buffers_.size(); ++b) {
      std::vector<at::Tensor> values;
      for (const auto& micro_batch : of_micro_batch_) values.push_back(micro_batch[b].contiguous());
      if (is_statistic_[b]) {
        buffers_[b].copy_(ordered_sum(*group_, values).div_(share_.total));
      } else {
        std::vector<at::Tensor> first{values.front().clone()};
        group_->broadcast(first)->wait();
        buffers_[b].copy_(first[0]);
      }
    }
  }

 private:
  static void copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
    for (std::size_t b = 0; b < from.size(); ++b) to[b].copy_(from[b]);
  }
  void store_current() {
    if (inside_ >= 0) copy(buffers_, of_micro_batch_[static_cast<std::size_t>(inside_)]);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  step::MicroBatchShare share_;
  std::vector<at::Tensor> buffers_;
  std::vector<bool> is_statistic_;
  std::vector<std::vector<at::Tensor>> of_micro_batch_;  ///< [micro-batches of this rank][buffers]
  /// The micro-batch whose values are in the module; -1 after synchronise() and before the first batch.
  int inside_ = -1;
};

std::shared_ptr<PreparedModel> PreparedModel::prepare(std::shared_ptr<torch::nn::Module> module,
                                                      const ParallelContext& context, const ModelOptions& options) {
  // The ranks choose progress_thread by themselves.
  comm::require_same_options(context.communicator, "prepare_model",
                             {{"parallel", options.parallel == Parallel::data ? "data" : "none"},
                              {"bucket_bytes", options.bucket_bytes},
                              {"first_bucket_bytes", options.first_bucket_bytes},
                              {"comm_hook", options.comm_hook ? "given" : "none"},
                              {"sync_batch_norm", options.sync_batch_norm}});
  require_unprepared(*module);
  if (options.parallel != Parallel::none && context.communicator.size() > 1) require_equal_weights(*module);
  if (options.sync_batch_norm && options.parallel != Parallel::none) replace_batch_norms(*module);
  module->to(context.device);
  std::shared_ptr<PreparedModel> prepared(new PreparedModel(std::move(module), context.communicator));
  if (options.parallel != Parallel::none) prepared->average(context, options);
  return prepared;
}

PreparedModel::PreparedModel(std::shared_ptr<torch::nn::Module> module, Communicator communicator)
    : module_(std::move(module)), communicator_(std::move(communicator)) {}
PreparedModel::~PreparedModel() = default;

void PreparedModel::average(const ParallelContext& context, const ModelOptions& options) {
  if (const auto difference = first_difference(communicator_.all_gather(signature(*module_))))
    throw Error(ExitCode::data, preparing, *difference, "Build the same model on every rank");
  group_ = context.new_group();
  broadcast_from(0);
  statistics_ = connect_batch_norms(*module_, context);
  const auto make_sparse = [group = group_,
                            context](const std::vector<at::Tensor>& parameters) -> std::unique_ptr<Exchange> {
    if (context.share.fixed)
      throw Error(ExitCode::usage, preparing, "virtual workers do not sum the gradients of sparse embeddings",
                  "Make the embedding with sparse(false)");
    return std::make_unique<SparseExchange>(parameters, group);
  };
  reducer_ = std::make_shared<Reducer>(module_, context, exchange_maker(context, group_, options), make_sparse);
  reducer_->install();
  if (context.share.fixed) micro_batches_ = std::make_unique<MicroBatchBuffers>(*module_, group_, context.share);
}

void PreparedModel::load_buffers_of(int micro_batch) {
  if (micro_batches_) micro_batches_->load_buffers_of(micro_batch);
}

void PreparedModel::synchronise_buffers() {
  if (!reducer_) return;
  reducer_->check_parameters();
  reducer_->finish_abandoned_rounds();  // rounds that exceptions have ended may still use the process group
  if (micro_batches_) return micro_batches_->synchronise();
  std::vector<at::Tensor> statistics, counts;
  for (const auto& buffer : module_->named_buffers()) {
    if (is_running_statistic(buffer.key(), buffer.value())) statistics.push_back(buffer.value());
    if (last_part(buffer.key()) == "num_batches_tracked") counts.push_back(buffer.value());
  }
  average_tensors(*group_, statistics);
  broadcast(*group_, counts);
}

void PreparedModel::broadcast_from(int rank) {
  if (!group_) return;
  auto tensors = module_->parameters();
  const auto buffers = module_->buffers();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  broadcast(*group_, tensors, rank);
}

const Communicator& PreparedModel::channel() {
  if (!channel_) channel_ = communicator_.duplicate();
  return *channel_;
}

}  // namespace muster::detail::gradients

namespace muster {

StepScope::StepScope(std::shared_ptr<detail::step::Steps> steps, std::shared_ptr<const detail::step::BatchWeight> batch)
    : steps_(std::move(steps)), scope_(steps_->enter_scope(std::move(batch))) {}

StepScope::~StepScope() { steps_->leave_scope(scope_); }

}  // namespace muster
