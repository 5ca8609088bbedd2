// Batch normalisation (Ioffe and Szegedy, 2015) with mean and variance over the samples of all ranks.
//
// Let x be the m_r values of a channel in rank r's batch, and M = Σ m_r. One sum of (m_r, Σx, Σx²) over the ranks gives
// the mean μ and the variance σ² (for doubles, a second sum gives σ²), with the same bits on every rank; y = γ x̂ + β
// with x̂ = (x − μ) / √(σ² + ε).
//
// The training loss is L = 1/R Σ w_r L_r: each rank's gradients are weighted by its batch (w_r) and averaged. Through μ
// and σ², each L_r depends on the samples of all ranks. With dy = ∂L_r/∂y, as in backward() on rank r,
//
//   R ∂L/∂x = γ / √(σ² + ε) · (w_r dy − 1/M Σ_s w_s Σ dy − x̂/M Σ_s w_s Σ dy x̂)
//
// Normalise::backward() returns this divided by w_r, since the reducer later multiplies all gradients computed from it
// by w_r. The gradients of γ and β are sums over this rank's own samples, weighted and averaged like all others.
//
// Samples of weight 0 do not count in M. If all samples have weight 0, μ is taken as 0 and σ² as 1, and ∂L/∂x is 0.
#include "gradients/sync_batch_norm.hpp"

#include "gradients/prepared_model.hpp"
#include "muster/error.hpp"
#include "muster/sync_batch_norm.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstddef>
#include <ostream>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace muster::detail::gradients {
namespace {

namespace nn = torch::nn;
namespace autograd = torch::autograd;

constexpr const char* normalising = "normalising a batch over the ranks";

/// Returns all dimensions except the channels (dimension 1).
std::vector<std::int64_t> all_but_channels(const at::Tensor& input) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

/// Returns a view of a tensor with one value per channel that broadcasts to the shape of `batch`.
at::Tensor along(const at::Tensor& per_channel, const at::Tensor& batch) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(batch.dim()), 1);
  shape[1] = -1;
  return per_channel.view(shape);
}

at::ScalarType type_of_statistics(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Statistics of the batches of all ranks.
struct Statistics {
  at::Tensor mean, variance;
  double count = 0;  ///< values per channel over all ranks; 0 if all batches have weight 0
};

/// Returns the number of values per channel over all ranks. `sums`: over the ranks, of [values per channel, 1], or [0,
/// 0] from a rank whose batch has weight 0.
double count_of_all(const at::Tensor& sums) {
  const auto count = sums[0].item<double>();
  if (count <= 1 && sums[1].item<double>() > 0)
    throw Error(ExitCode::user_error, normalising, "all ranks together have one value for each channel, or none",
                "Use larger batches, or call the module's eval()");
  return count;
}

Statistics statistics_of_all(const at::Tensor& input, BatchNormRanks& ranks, int layer) {
  const at::NoGradGuard no_grad;
  const auto channels = input.size(1);
  const auto doubles = input.options().dtype(at::kDouble).requires_grad(false);
  const bool counts = ranks.weight() > 0;
  const auto own = counts ? static_cast<double>(input.numel() / channels) : 0.0;
  auto mean = at::zeros({channels}, doubles), variance = mean;
  if (own > 0) {
    const auto type = type_of_statistics(input);
    const auto [v, m] = at::var_mean(input.to(type), all_but_channels(input), /*correction=*/at::Scalar(0));
    mean = m.to(at::kDouble);
    variance = v.to(at::kDouble);
  }
  const auto count = at::full({1}, own, doubles), rank = at::full({1}, counts ? 1.0 : 0.0, doubles);
  Statistics all{.mean = at::zeros({channels}, doubles), .variance = at::ones({channels}, doubles)};
  // For doubles, the squares would need more digits than a double has, so squared deviations are summed once the mean
  // is known.
  if (input.scalar_type() == at::kDouble) {
    const auto sums = ranks.sum(at::cat({count, rank, mean * own}), 2 * layer);
    all.count = count_of_all(sums);
    if (all.count == 0) return all;
    all.mean = sums.narrow(0, 2, channels) / all.count;
    all.variance = ranks.sum((variance + (mean - all.mean).square()) * own, 2 * layer) / all.count;
    return all;
  }
  const auto sums = ranks.sum(at::cat({count, rank, mean * own, (variance + mean * mean) * own}), 2 * layer);
  all.count = count_of_all(sums);
  if (all.count == 0) return all;
  all.mean = sums.narrow(0, 2, channels) / all.count;
  all.variance = (sums.narrow(0, 2 + channels, channels) / all.count - all.mean * all.mean).clamp_min(0);
  return all;
}

/// Lets an autograd node hold a weak pointer to the BatchNormRanks in its saved data.
struct Ranks : torch::CustomClassHolder {
  explicit Ranks(const std::shared_ptr<BatchNormRanks>& ranks) : statistics(ranks) {}
  std::weak_ptr<BatchNormRanks> statistics;
};

class Normalise : public autograd::Function<Normalise> {
 public:
  static at::Tensor forward(autograd::AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias, const Statistics& all, double eps,
                            const std::shared_ptr<BatchNormRanks>& ranks, std::int64_t layer) {
    context->save_for_backward({input, weight, all.mean, (all.variance + eps).rsqrt()});
    context->saved_data["counts"] = ranks->weight() > 0;
    context->saved_data["count"] = all.count;
    context->saved_data["layer"] = layer;
    context->saved_data["ranks"] = c10::IValue::make_capsule(c10::make_intrusive<Ranks>(ranks));
    // Normalises with the given statistics, as a batch-norm does in evaluation.
    const auto type = type_of_statistics(input);
    return std::get<0>(at::native_batch_norm(input, weight.to(type), bias.to(type), all.mean.to(type),
                                             all.variance.to(type), /*training=*/false, /*momentum=*/0.0, eps));
  }

  static autograd::variable_list backward(autograd::AutogradContext* context, autograd::variable_list gradients) {
    const auto ranks =
        c10::static_intrusive_pointer_cast<Ranks>(context->saved_data["ranks"].toCapsule())->statistics.lock();
    if (!ranks)
      throw Error(ExitCode::user_error, normalising, "the session or DataParallel of this forward pass is over",
                  "Call backward() before it ends");
    if (at::GradMode::is_enabled())
      throw Error(ExitCode::usage, normalising, "gradients of gradients were requested",
                  "Call backward() without create_graph, or use an ordinary batch-norm");
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &mean = saved[2], &inverse = saved[3];
    const auto type = type_of_statistics(input);
    const auto along_input = [&](const at::Tensor& per_channel) { return along(per_channel.to(type), input); };
    const auto gradient = gradients[0].to(type), centred = input.to(type) - along_input(mean);
    const auto dimensions = all_but_channels(input);
    const auto sum = gradient.sum(dimensions, false, at::kDouble),
               sum_of_products = (gradient * centred).sum(dimensions, false, at::kDouble) * inverse;

    autograd::variable_list found(7);
    if (context->needs_input_grad(0)) {
      const double own = ranks->weight();
      if (context->saved_data["counts"].toBool() != (own > 0))
        throw Error(ExitCode::usage, normalising, "only one of forward() and backward() had the batch's weight of 0",
                    "Open the scope of session.step(batch, weight) before forward()");
      // The loss of a batch of weight 0 may be NaN, and 0 * NaN is NaN, so zeros are sent instead.
      const auto sums = at::cat({sum, sum_of_products});
      const auto of_all = ranks
                              ->sum(own > 0 ? sums * own : at::zeros_like(sums),
                                    2 * static_cast<int>(context->saved_data["layer"].toInt()) + 1)
                              .div_(own * context->saved_data["count"].toDouble())
                              .view({2, -1});
      const auto factor = weight.to(at::kDouble) * inverse;
      found[0] =
          own > 0
              ? ((gradient - along_input(of_all[0]) - centred * along_input(of_all[1] * inverse)) * along_input(factor))
                    .to(input.scalar_type())
              : at::zeros_like(input);
    }
    found[1] = sum_of_products.to(weight.scalar_type());
    found[2] = sum.to(weight.scalar_type());
    return found;
  }
};

void update(at::Tensor running_mean, at::Tensor running_var, const Statistics& all, double factor) {
  const at::NoGradGuard no_grad;
  const auto move_to = [&](at::Tensor& running, const at::Tensor& now) {
    running.mul_(1 - factor).add_(now.to(running.scalar_type()), factor);
  };
  move_to(running_mean, all.mean);
  move_to(running_var, all.variance * (all.count / (all.count - 1)));
}

/// `weight` and `bias` may be undefined.
at::Tensor normalise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const Statistics& all,
                     double eps, const std::shared_ptr<BatchNormRanks>& ranks, int layer) {
  const auto constants = input.options().dtype(type_of_statistics(input)).requires_grad(false);
  return Normalise::apply(input, weight.defined() ? weight : at::ones({input.size(1)}, constants),
                          bias.defined() ? bias : at::zeros({input.size(1)}, constants), all, eps, ranks,
                          std::int64_t{layer});
}

/// A batch-norm of torch that can be replaced.
struct ReplaceableNorm {
  nn::SequentialImpl* parent;
  std::ptrdiff_t number;  ///< its index in the parent
  std::string name;
  std::shared_ptr<nn::Module> norm;
};

template <class Norm, class Sync>
bool replace_norm(const ReplaceableNorm& replaceable) {
  const auto* const norm = replaceable.norm->as<Norm>();
  if (!norm) return false;
  const auto sync = std::make_shared<Sync>(norm->options);
  sync->take_over(*norm);
  *(replaceable.parent->begin() + replaceable.number) = nn::AnyModule(sync);
  replaceable.parent->replace_module(replaceable.name, sync);
  return true;
}

/// True only for torch's own classes: a derived class may compute something else.
bool is_torch_batch_norm(const nn::Module& module) {
  const auto& type = typeid(module);
  return type == typeid(nn::BatchNorm1dImpl) || type == typeid(nn::BatchNorm2dImpl) ||
         type == typeid(nn::BatchNorm3dImpl);
}

/// True for torch's batch-norms and classes derived from them, and for all other modules with a buffer `running_mean`,
/// such as scripted batch-norms and those that a user has written. False for SyncBatchNorm and instance norms.
bool is_batch_norm(const nn::Module& module) {
  if (dynamic_cast<const Synchronised*>(&module) || module.as<nn::InstanceNorm1d>() ||
      module.as<nn::InstanceNorm2d>() || module.as<nn::InstanceNorm3d>())
    return false;
  return module.as<nn::BatchNorm1d>() || module.as<nn::BatchNorm2d>() || module.as<nn::BatchNorm3d>() ||
         module.named_buffers(/*recurse=*/false).contains("running_mean");
}

/// Finds the replaceable batch-norms in the module and its submodules. Throws an Error if there is a batch-norm that
/// cannot be replaced.
void find_norms(nn::Module& module, const std::string& path, std::vector<ReplaceableNorm>& norms,
                std::vector<BatchNormOperators*>& graphs) {
  if (auto* const graph = dynamic_cast<BatchNormOperators*>(&module)) {
    graph->require_synchronisable();
    return graphs.push_back(graph);
  }
  auto* const parent = module.as<nn::Sequential>();
  if (is_batch_norm(module))
    throw Error(ExitCode::usage, "exchanging batch-norms for synchronised ones",
                (path.empty() ? "the model itself" : path) + " is a batch-norm that " +
                    (is_torch_batch_norm(module) ? "does not stand in a Sequential" : "is not of torch's own class"),
                "Write muster::SyncBatchNorm2d, or 1d or 3d, there");
  std::ptrdiff_t number = 0;
  for (const auto& child : module.named_children()) {
    const auto of_child = path.empty() ? child.key() : path + "." + child.key();
    if (parent && is_torch_batch_norm(*child.value()))
      norms.push_back({parent, number, child.key(), child.value()});
    else
      find_norms(*child.value(), of_child, norms, graphs);
    ++number;
  }
}

}  // namespace

BatchNormRanks::BatchNormRanks(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const step::Steps> steps)
    : group_(std::move(group)), steps_(std::move(steps)) {}
BatchNormRanks::~BatchNormRanks() = default;

at::Tensor BatchNormRanks::sum(const at::Tensor& values, int layer) {
  std::vector<at::Tensor> sums{at::cat({at::full({1}, layer, values.options()), values})};
  group_->allreduce(sums)->wait();
  if (values.is_cpu() && sums[0][0].item<double>() != static_cast<double>(layer) * group_->getSize())
    throw Error(ExitCode::user_error, normalising, "the ranks are in different SyncBatchNorms, or in different passes",
                "Let all ranks run the same forward and backward passes, in the same order");
  return sums[0].slice(0, 1);
}

void replace_batch_norms(nn::Module& module) {
  std::vector<ReplaceableNorm> norms;
  std::vector<BatchNormOperators*> graphs;
  find_norms(module, {}, norms, graphs);
  for (auto* const graph : graphs) graph->synchronise_batch_norms();
  for (const auto& replaceable : norms)
    replace_norm<nn::BatchNorm1dImpl, SyncBatchNorm1dImpl>(replaceable) ||
        replace_norm<nn::BatchNorm2dImpl, SyncBatchNorm2dImpl>(replaceable) ||
        replace_norm<nn::BatchNorm3dImpl, SyncBatchNorm3dImpl>(replaceable);
}

at::Tensor SynchronisedOperator::operator()(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                            const at::Tensor& running_mean, const at::Tensor& running_var,
                                            double momentum, double eps) const {
  const auto ranks = ranks_.lock();
  const auto all = statistics_of_all(input, *ranks, layer_);
  if (running_mean.defined() && all.count > 0) update(running_mean, running_var, all, momentum);
  return normalise(input, weight, bias, all, eps, ranks, layer_);
}

std::shared_ptr<BatchNormRanks> connect_batch_norms(nn::Module& module, const ParallelContext& context) {
  std::vector<Synchronised*> layers;
  module.apply([&](nn::Module& part) {
    if (auto* const layer = dynamic_cast<Synchronised*>(&part)) layers.push_back(layer);
    if (auto* const graph = dynamic_cast<BatchNormOperators*>(&part))
      for (auto* const layer : graph->synchronised_operators()) layers.push_back(layer);
  });
  if (layers.empty()) return nullptr;
  if (context.share.fixed)
    throw Error(ExitCode::usage, "preparing the model",
                "it has a SyncBatchNorm, which does not work with virtual workers",
                "Use torch's batch-norm, which normalises each micro-batch by itself, or no virtual_workers");
  auto shared = std::make_shared<BatchNormRanks>(context.new_group(), context.steps);
  if (context.communicator.size() > 1)
    for (std::size_t i = 0; i < layers.size(); ++i) layers[i]->synchronise_over(shared, static_cast<int>(i));
  return shared;
}

}  // namespace muster::detail::gradients

namespace muster {

using namespace detail::gradients;

template <std::size_t D, class Derived>
at::Tensor SyncBatchNormImplBase<D, Derived>::forward(const at::Tensor& input) {
  const auto ranks = ranks_.lock();
  if (!ranks || !this->is_training()) return torch::nn::BatchNormImplBase<D, Derived>::forward(input);
  _check_input_dim(input);
  const auto& options = this->options;
  const auto all = statistics_of_all(input, *ranks, layer_);
  if (options.track_running_stats() && all.count > 0) {
    const at::NoGradGuard no_grad;
    this->num_batches_tracked += 1;
    const auto momentum = options.momentum();
    update(this->running_mean, this->running_var, all,
           momentum ? *momentum : 1.0 / this->num_batches_tracked.template item<double>());
  }
  return normalise(input, this->weight, this->bias, all, options.eps(), ranks, layer_);
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::pretty_print(std::ostream& stream) const {
  const auto& options = this->options;
  stream << std::boolalpha << "muster::SyncBatchNorm" << D << "d(" << options.num_features()
         << ", eps=" << options.eps() << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ')';
}

template <std::size_t D, class Derived>
void SyncBatchNormImplBase<D, Derived>::_check_input_dim(const at::Tensor& input) {
  const auto dimensions = static_cast<std::size_t>(input.dim());
  TORCH_CHECK(dimensions == D + 2 || (D == 1 && dimensions == 2), "SyncBatchNorm", D, "d takes an input of ",
              D == 1 ? "2 or 3" : std::to_string(D + 2), " dimensions, and got one of ", dimensions);
}

template class SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>;
template class SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>;
template class SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>;

}  // namespace muster
