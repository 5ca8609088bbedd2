#include "model/reducer.hpp"

#include "model/buckets.hpp"
#include "model/hooks.hpp"
#include "muster/error.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace muster::model {
namespace {

constexpr const char* averaging = "averaging gradients";

std::string text_of(at::ScalarType type, at::IntArrayRef sizes, c10::Device device) {
  return c10::str(type, sizes, " on ", device);
}

[[noreturn]] void refuse(const std::string& fact) {
  throw Error(ExitCode::data, averaging, fact, "Change the model first, then call prepare_model");
}

}  // namespace

struct Reducer::Parameter {
  std::string name;
  at::Tensor tensor;
  // As it was when it was prepared.
  std::vector<std::int64_t> sizes;
  at::ScalarType type;
  c10::Device device;

  static constexpr std::size_t none = ~std::size_t{0};
  std::size_t bucket = none;
  at::Tensor place = {};  ///< in the bucket, in the parameter's shape

  bool reached = false;  ///< in the pass under way
  bool used = false;     ///< what is in the bucket came from a sample
  bool pending = false;  ///< .grad holds what was added up and not yet averaged
  bool ghost = false;    ///< .grad was made by passes of weight 0 alone

  bool changed() const {
    return tensor.sizes() != at::IntArrayRef(sizes) || tensor.scalar_type() != type || tensor.device() != device;
  }
};

struct Reducer::Bucket {
  std::vector<std::size_t> parameters;
  at::Tensor flat;  ///< the gradients, then `used`
  at::Tensor used;  ///< [parameters], in the end on how many ranks each was used; NaN: a rank has left the pass
  std::size_t missing = 0;
  c10::intrusive_ptr<c10d::Work> work;
};

struct Reducer::Pass {
  bool averages = true;
};

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, c10::intrusive_ptr<c10d::ProcessGroup> group,
                 std::shared_ptr<const data::StepWeight> weight, std::shared_ptr<const int> no_sync_depth,
                 const ModelOptions& options)
    : module_(std::move(module)),
      group_(std::move(group)),
      weight_(std::move(weight)),
      no_sync_depth_(std::move(no_sync_depth)),
      options_(options),
      world_(group_->getSize()),
      scale_(at::scalar_tensor(1.0 / world_, at::kDouble)) {
  std::set<const void*> seen;  // parameters() lists a shared tensor under each of its names
  for (const auto& item : module_->named_parameters()) {
    const auto& tensor = item.value();
    names_.emplace_back(item.key(), tensor.unsafeGetTensorImpl());
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!at::isFloatingType(tensor.scalar_type()) && !at::isComplexType(tensor.scalar_type())) continue;
    parameters_.push_back({item.key(), tensor, tensor.sizes().vec(), tensor.scalar_type(), tensor.device()});
  }
  make_buckets();
}

Reducer::~Reducer() = default;

void Reducer::install() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) install_hooks(parameters_[i].tensor, weak_from_this(), i);
}

void Reducer::check_parameters() const {
  const auto now = module_->named_parameters();
  for (const auto& [name, tensor] : names_) {
    const auto* found = now.find(name);
    if (!found) refuse("parameter " + name + " was removed from the model after prepare_model");
    if (found->unsafeGetTensorImpl() != tensor) refuse("parameter " + name + " was replaced after prepare_model");
  }
  if (now.size() != names_.size())
    for (const auto& item : now)
      if (std::none_of(names_.begin(), names_.end(), [&](const auto& known) { return known.first == item.key(); }))
        refuse("parameter " + item.key() + " was added to the model after prepare_model");
  for (const auto& p : parameters_)
    if (p.changed())
      refuse("parameter " + p.name + " was " + text_of(p.type, p.sizes, p.device) + " in prepare_model and is " +
             text_of(p.tensor.scalar_type(), p.tensor.sizes(), p.tensor.device()) + " now");
}

/// Over the parameters that are or once were to be trained.
void Reducer::make_buckets() {
  std::vector<std::size_t> members;
  std::vector<GradientSize> sizes;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& p = parameters_[i];
    if (!p.tensor.requires_grad() && p.bucket == Parameter::none) continue;
    const auto same_kind = std::find_if(parameters_.begin(), parameters_.end(), [&](const Parameter& other) {
      return other.type == p.type && other.device == p.device;
    });
    members.push_back(i);
    sizes.push_back({p.tensor.nbytes(), static_cast<int>(same_kind - parameters_.begin())});
  }
  buckets_.clear();
  for (const auto& chosen : assign_buckets(sizes, options_.first_bucket_bytes, options_.bucket_bytes)) {
    Bucket bucket;
    std::int64_t elements = 0;
    for (const auto i : chosen) {
      bucket.parameters.push_back(members[i]);
      elements += parameters_[members[i]].tensor.numel();
    }
    const auto count = static_cast<std::int64_t>(chosen.size());
    bucket.flat =
        at::empty({elements + count}, parameters_[bucket.parameters[0]].tensor.options().requires_grad(false));
    bucket.used = bucket.flat.narrow(0, elements, count);
    std::int64_t offset = 0;
    for (const auto i : bucket.parameters) {
      auto& p = parameters_[i];
      p.bucket = buckets_.size();
      const auto piece = bucket.flat.narrow(0, offset, p.tensor.numel());
      // In the parameter's own order of memory, so that copies run straight through.
      p.place =
          p.tensor.is_non_overlapping_and_dense() ? piece.as_strided(p.sizes, p.tensor.strides()) : piece.view(p.sizes);
      offset += p.tensor.numel();
    }
    buckets_.push_back(std::move(bucket));
  }
}

at::Tensor Reducer::weigh(std::size_t parameter, const at::Tensor& gradient) {
  const double weight = weight_->relative(world_);
  auto& p = parameters_[parameter];
  if (weight == 1.0 || !accumulates(p.tensor)) return gradient;
  if (weight > 0.0) return gradient * weight;
  if (!p.tensor.grad().defined()) p.ghost = true;
  return at::zeros_like(gradient);  // a ghost's loss may be NaN, which 0 does not mend
}

void Reducer::accumulated(std::size_t parameter) {
  auto pass = pass_.lock();
  if (!pass) pass = begin();
  auto& p = parameters_[parameter];
  const auto& gradient = p.tensor.grad();
  if (gradient.layout() != at::kStrided)
    throw Error(ExitCode::data, averaging, "the gradient of parameter " + p.name + " is sparse",
                "Make it dense, for an embedding with sparse(false)");
  if (gradient.scalar_type() != p.type)
    throw Error(ExitCode::data, averaging,
                c10::str("the gradient of parameter ", p.name, " is ", gradient.scalar_type(), ", not ", p.type),
                "Keep gradients in the type of their parameter");
  if (p.reached)
    throw Error(ExitCode::data, averaging, "parameter " + p.name + " was given a gradient twice in one backward()",
                "Do not run backward() inside backward()");

  const bool counts = weight_->relative(world_) > 0.0;
  if (counts) p.ghost = false;
  if (!pass->averages) {
    p.pending |= counts;
    return;
  }
  p.reached = true;
  p.used = counts || p.pending;
  load(p);
  --buckets_[p.bucket].missing;
  issue_full();
}

std::shared_ptr<Reducer::Pass> Reducer::begin() {
  drain();
  check_parameters();
  if (std::any_of(parameters_.begin(), parameters_.end(),
                  [](const Parameter& p) { return p.bucket == Parameter::none && p.tensor.requires_grad(); }))
    make_buckets();
  for (auto& p : parameters_) p.reached = false;
  for (auto& bucket : buckets_) bucket.missing = bucket.parameters.size();
  issued_ = 0;

  const auto pass = std::make_shared<Pass>(Pass{*no_sync_depth_ == 0});
  pass_ = pass;
  open_ = pass->averages;
  at_end_of_backward([weak = weak_from_this(), pass] {
    const auto self = weak.lock();
    if (!self || !pass->averages) return;
    self->issue_rest();
    // After the rest of every other model in this backward(), which may come in another order on another rank.
    at_end_of_backward([weak, pass] {
      if (const auto again = weak.lock()) again->finish();
    });
  });
  return pass;
}

void Reducer::load(Parameter& parameter) {
  const at::NoGradGuard no_grad;
  const auto& gradient = parameter.tensor.grad();
  if (gradient.defined())
    at::mul_out(parameter.place, gradient, scale_);
  else
    parameter.place.zero_();
}

void Reducer::issue_full() {
  while (issued_ < buckets_.size() && buckets_[issued_].missing == 0) issue(buckets_[issued_++]);
}

void Reducer::issue(Bucket& bucket) {
  const at::NoGradGuard no_grad;
  std::vector<float> used;
  for (const auto i : bucket.parameters) used.push_back(parameters_[i].used ? 1.0f : 0.0f);
  bucket.used.copy_(at::tensor(used));
  std::vector<at::Tensor> tensors{bucket.flat};
  bucket.work = group_->allreduce(tensors);
}

/// What this pass did not reach gives what an earlier one has left in .grad, which is the same on all ranks unless it
/// is pending.
void Reducer::issue_rest() {
  for (; issued_ < buckets_.size(); ++issued_) {
    for (const auto i : buckets_[issued_].parameters) {
      auto& p = parameters_[i];
      if (p.reached) continue;
      p.used = p.pending && p.tensor.grad().defined();
      load(p);
    }
    issue(buckets_[issued_]);
  }
}

void Reducer::finish() {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets_) {
    bucket.work->wait();
    bucket.work.reset();
    const auto used = bucket.used.abs().to(at::kCPU, at::kFloat);
    const auto* on_ranks = used.const_data_ptr<float>();
    for (std::size_t i = 0; i < bucket.parameters.size(); ++i) store(parameters_[bucket.parameters[i]], on_ranks[i]);
  }
  open_ = false;
}

void Reducer::store(Parameter& parameter, float used) {
  if (std::isnan(used))
    throw Error(ExitCode::user_error, averaging, "another rank has left this backward() by an exception and gone on",
                "Let the exception end the training function");
  auto& gradient = parameter.tensor.mutable_grad();
  if (used > 0.0f) {
    if (gradient.defined())
      gradient.copy_(parameter.place);
    else
      gradient = parameter.place.clone();
  } else if (parameter.ghost) {
    gradient.reset();
  }
  parameter.pending = parameter.ghost = false;
}

/// Ends a pass that an exception has cut off: the other ranks may wait for its buckets.
void Reducer::drain() {
  if (!open_) return;
  const at::NoGradGuard no_grad;
  for (; issued_ < buckets_.size(); ++issued_) {
    auto& bucket = buckets_[issued_];
    bucket.flat.fill_(std::numeric_limits<double>::quiet_NaN());
    std::vector<at::Tensor> tensors{bucket.flat};
    bucket.work = group_->allreduce(tensors);
  }
  for (auto& bucket : buckets_) {
    if (!bucket.work) continue;
    bucket.work->wait();
    bucket.work.reset();
  }
  open_ = false;
}

}  // namespace muster::model
