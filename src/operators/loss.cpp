#include "operators/loss.hpp"

#include "muster/error.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/record_function.h>
#include <torch/nn/modules/loss.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <sstream>
#include <string_view>

namespace muster::detail::operators {
namespace {

/// True if broadcasting two shapes gives more elements than either has: [8, 1] and [8] give [8, 8].
bool would_grow(at::IntArrayRef a, at::IntArrayRef b) {
  const auto dims = std::max(a.size(), b.size());
  std::int64_t of_a = 1, of_b = 1, of_both = 1;
  for (std::size_t i = 1; i <= dims; ++i) {  // from the last dimension on
    const auto size_a = i <= a.size() ? a[a.size() - i] : 1, size_b = i <= b.size() ? b[b.size() - i] : 1;
    if (size_a != size_b && size_a != 1 && size_b != 1) return false;
    of_a *= size_a, of_b *= size_b, of_both *= std::max(size_a, size_b);
  }
  return of_both > std::max(of_a, of_b);
}

/// Operations of torch that broadcast two tensors to a common shape. Classification losses do not: their targets are
/// class numbers.
constexpr std::string_view broadcasting[] = {"aten::add",
                                             "aten::add_",
                                             "aten::sub",
                                             "aten::sub_",
                                             "aten::rsub",
                                             "aten::mul",
                                             "aten::mul_",
                                             "aten::div",
                                             "aten::div_",
                                             "aten::pow",
                                             "aten::eq",
                                             "aten::ne",
                                             "aten::lt",
                                             "aten::le",
                                             "aten::gt",
                                             "aten::ge",
                                             "aten::maximum",
                                             "aten::minimum",
                                             "aten::xlogy",
                                             "aten::where",
                                             "aten::mse_loss",
                                             "aten::l1_loss",
                                             "aten::huber_loss",
                                             "aten::smooth_l1_loss",
                                             "aten::kl_div",
                                             "aten::soft_margin_loss",
                                             "aten::poisson_nll_loss",
                                             "aten::binary_cross_entropy_with_logits",
                                             "aten::broadcast_tensors"};

/// While it lives, watches this thread's torch operations, and records whether one of them broadcasts a tensor of the
/// output's shape and a tensor of the target's shape.
class BroadcastWatch {
 public:
  BroadcastWatch(const at::Tensor& output, const at::Tensor& target) : output_(output), target_(target) {
    current = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&look).needsInputs(true));
  }
  BroadcastWatch(const BroadcastWatch&) = delete;
  BroadcastWatch& operator=(const BroadcastWatch&) = delete;
  ~BroadcastWatch() {
    at::removeCallback(handle_);
    current = nullptr;
  }
  bool has_seen_one() const noexcept { return seen_; }

 private:
  static std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& function) {
    if (current == nullptr || std::ranges::find(broadcasting, function.name()) == std::end(broadcasting))
      return nullptr;
    bool of_output = false, of_target = false;
    const auto look_at = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      // Broadcasting the output with itself is allowed, as over all pairs of samples in a batch.
      of_output = of_output || (tensor.sizes() == current->output_.sizes() && !tensor.is_alias_of(current->target_));
      of_target = of_target || (tensor.sizes() == current->target_.sizes() && !tensor.is_alias_of(current->output_));
    };
    for (const auto& input : function.inputs())
      if (input.isTensor())
        look_at(input.toTensor());
      else if (input.isTensorList())
        for (const at::Tensor& tensor : input.toTensorList()) look_at(tensor);
    current->seen_ = current->seen_ || (of_output && of_target);
    return nullptr;
  }

  static thread_local BroadcastWatch* current;
  const at::Tensor& output_;
  const at::Tensor& target_;
  at::CallbackHandle handle_{};
  bool seen_ = false;
};
thread_local BroadcastWatch* BroadcastWatch::current = nullptr;

[[noreturn]] void refuse(const char* doing, const at::Tensor& output, const at::Tensor& target) {
  std::ostringstream fact;
  fact << "the criterion broadcasts the output of shape " << output.sizes() << " and the target of shape "
       << target.sizes() << " against each other";
  throw Error(
      ExitCode::user_error, doing, fact.str(),
      "Give both the same shape, for example with the criterion [](const at::Tensor& output, const at::Tensor& target) "
      "{ return torch::mse_loss(output, target.view_as(output)); }");
}

template <class... Losses>
bool is_any_of(const torch::nn::Module* criterion) {
  return ((dynamic_cast<const Losses*>(criterion) != nullptr) || ...);
}

}  // namespace

bool is_elementwise(const torch::nn::Module* criterion) {
  using namespace torch::nn;
  return is_any_of<MSELossImpl, L1LossImpl, SmoothL1LossImpl, HuberLossImpl, BCELossImpl, BCEWithLogitsLossImpl,
                   KLDivLossImpl, PoissonNLLLossImpl, SoftMarginLossImpl>(criterion);
}

at::Tensor compute_loss(const char* doing, const OperatorRegistry& registry, const at::Tensor& output,
                        const at::Tensor& target) {
  if (registry.elementwise && output.sizes() != target.sizes()) refuse(doing, output, target);
  if (!would_grow(output.sizes(), target.sizes())) return registry.criterion(output, target);
  // The shapes alone are no error: a user's own criterion may bring output and target to the same shape itself.
  at::Tensor loss;
  bool broadcasts;
  {
    const BroadcastWatch watch(output, target);
    loss = registry.criterion(output, target);
    broadcasts = watch.has_seen_one();
  }
  if (broadcasts) refuse(doing, output, target);
  return loss;
}

}  // namespace muster::detail::operators
