#include "soak/net.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace muster::soak {

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  auto values = at::empty(sizes, at::kDouble);
  auto* data = values.mutable_data_ptr<double>();
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    // splitmix64
    std::uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z ^= z >> 31;
    data[i] = static_cast<double>(z >> 11) / 4503599627370496.0 - 1;
  }
  return values;
}

NetImpl::NetImpl(const Model& model, std::uint64_t seed) : model_(model) {
  using Kind = Branch::Kind;
  const std::int64_t width = model.width;
  std::uint64_t next = seed;
  const auto add = [&](const std::string& name, at::Tensor values) { return register_parameter(name, values); };
  in_ = add("in", numbers({width}, ++next) * 0.2 + 1);
  int index = 0;
  for (const auto& b : model.branches) {
    const auto name = "branch" + std::to_string(index++);
    const std::int64_t size = b.size;
    std::vector<at::Tensor> own;
    const auto weight = [&](const char* part, at::IntArrayRef sizes, double scale) {
      own.push_back(add(name + part, numbers(sizes, ++next) * scale));
    };
    switch (b.kind) {
      case Kind::linear:
        weight("_weight", {width, width}, 0.5);
        weight("_bias", {width}, 0.5);
        break;
      case Kind::wide:
        weight("_up", {size, width}, 0.5);
        weight("_down", {width, size}, 0.2);
        break;
      case Kind::scale:
        weight("_scale", {1}, 0.5);
        break;
      case Kind::shift:
        weight("_shift", {width}, 0.5);
        break;
      case Kind::embedding:
      case Kind::sparse_embedding: {
        torch::nn::Embedding embedding(
            torch::nn::EmbeddingOptions(size, width).sparse(b.kind == Kind::sparse_embedding));
        embedding->weight.set_data(numbers({size, width}, ++next));
        own.push_back(register_module(name, embedding)->weight);
        break;
      }
      case Kind::tied: {
        // The weight of an earlier linear branch, under a second name.
        for (std::size_t e = 0; e < branches_.size(); ++e)
          if (model.branches[e].kind == Kind::linear) {
            add(name + "_tied", branches_[e].front());
            break;
          }
        break;
      }
      case Kind::transposed:
        own.push_back(add(name + "_weight", (numbers({width, width}, ++next) * 0.5).t()));
        break;
      case Kind::convolution:
        weight("_kernel", {size, size, 3}, 0.3);
        break;
      case Kind::norm:
        weight("_weight", {width}, 0.5);
        weight("_bias", {width}, 0.5);
        break;
    }
    for (auto& p : own) p.set_requires_grad(!b.frozen);
    branches_.push_back(std::move(own));
  }
  out_ = add("out", numbers({width}, ++next));
}

std::vector<at::Tensor> NetImpl::each() const {
  std::vector<at::Tensor> tensors;
  std::set<const void*> seen;
  for (const auto& p : parameters())
    if (seen.insert(p.unsafeGetTensorImpl()).second) tensors.push_back(p);
  return tensors;
}

at::Tensor NetImpl::branch(int index, const at::Tensor& x, const at::Tensor& tokens) {
  using Kind = Branch::Kind;
  const auto& b = model_.branches.at(static_cast<std::size_t>(index));
  auto& own = branches_.at(static_cast<std::size_t>(index));
  switch (b.kind) {
    case Kind::linear:
      return at::tanh(at::linear(x, own[0], own[1]));
    case Kind::wide:
      return at::tanh(at::linear(at::tanh(at::linear(x, own[0])), own[1]));
    case Kind::scale:
      return x * own[0];
    case Kind::shift:
      return own[0].unsqueeze(0).expand_as(x);
    case Kind::embedding:
    case Kind::sparse_embedding:
      return at::embedding(own[0], tokens.remainder(b.size), -1, false, b.kind == Kind::sparse_embedding);
    case Kind::tied: {
      for (std::size_t e = 0; e < branches_.size() && e < static_cast<std::size_t>(index); ++e)
        if (model_.branches[e].kind == Kind::linear) return at::tanh(at::matmul(x, branches_[e].front()));
      return x * 0.5;
    }
    case Kind::transposed:
      return at::tanh(at::matmul(x, own[0]));
    case Kind::convolution: {
      const auto channels = at::tanh(x).unsqueeze(1).expand({-1, b.size, -1});
      return at::tanh(at::conv1d(channels, own[0], {}, 1, 1).mean(1));
    }
    default:
      return at::layer_norm(x, {model_.width}, own[0], own[1]);
  }
}

at::Tensor NetImpl::loss(const Part& part, int model, bool throws) {
  const auto seed = part.data + static_cast<std::uint64_t>(model) * 1000003;
  auto x = numbers({part.samples, model_.width}, seed) * in_;
  const auto tokens = ((numbers({part.samples}, seed + 7) + 1) * 500).to(at::kLong);
  const auto& used = part.branches.at(static_cast<std::size_t>(model));
  // backward() reaches this hook before the branches in front of it, and before `in`.
  const int at = std::max(0, static_cast<int>(used.size()) - part.throws_at);
  for (int i = 0; i <= static_cast<int>(used.size()); ++i) {
    if (throws && i == at) x.register_hook([](const at::Tensor&) { throw Thrown(); });
    if (i < static_cast<int>(used.size())) {
      const auto f = branch(used[static_cast<std::size_t>(i)], x, tokens);
      // If both sides of an addition have the same shape, both get the same gradient tensor.
      x = model_.branches[static_cast<std::size_t>(used[static_cast<std::size_t>(i)])].kind == Branch::Kind::shift
              ? x + f
              : (x + f) * 0.7;
    }
  }
  return at::tanh(at::matmul(x, out_)).square().mean() + 0.1 * at::matmul(x, out_).mean();
}

std::vector<Net> make_nets(const Program& program) {
  std::vector<Net> nets;
  for (std::size_t m = 0; m < program.models.size(); ++m) nets.emplace_back(program.models[m], program.seed * 100 + m);
  return nets;
}

void toggle(Net& net, int branch) {
  for (auto& p : net->of_branch(branch)) p.set_requires_grad(!p.requires_grad());
}

void apply(const Change& change, std::vector<Net>& nets) {
  const at::NoGradGuard no_grad;
  const auto parameters = nets.at(static_cast<std::size_t>(change.model))->each();
  auto p = parameters[static_cast<std::size_t>(change.parameter) % parameters.size()];
  switch (change.kind) {
    case Change::Kind::in_place:
      p.mul_(0.9);
      break;
    case Change::Kind::pointer: {
      // Writes a tenth of the elements, at the offsets that the strides give.
      auto* data = p.data_ptr<double>();
      const auto count = std::max<std::int64_t>(1, p.numel() / 10), first = (p.numel() - count) / 2;
      for (auto i = first; i < first + count; ++i) {
        std::int64_t rest = i, offset = 0;
        for (auto d = p.dim(); d-- > 0; rest /= p.size(d)) offset += rest % p.size(d) * p.stride(d);
        data[offset] = 0.125;
      }
      break;
    }
    case Change::Kind::data:
      p.data().clamp_(-0.5, 0.5);
      break;
    case Change::Kind::other_memory:
      p.set_data(p.detach() * 0.8);
      break;
    case Change::Kind::transposed_memory:
      if (p.dim() == 2) p.set_data(p.detach().t().contiguous().t());
      break;
  }
}

void set(torch::optim::Optimizer& optimizer, Program::Optimizer kind, const OptimizerSetting& s) {
  namespace o = torch::optim;
  for (auto& group : optimizer.param_groups()) {
    if (kind == Program::Optimizer::sgd)
      static_cast<o::SGDOptions&>(group.options())
          .lr(s.lr)
          .momentum(s.momentum)
          .dampening(s.dampening)
          .weight_decay(s.weight_decay)
          .nesterov(s.nesterov);
    else if (kind == Program::Optimizer::adam)
      static_cast<o::AdamOptions&>(group.options())
          .lr(s.lr)
          .betas({s.beta1, s.beta2})
          .eps(s.eps)
          .weight_decay(s.weight_decay);
    else
      static_cast<o::AdamWOptions&>(group.options())
          .lr(s.lr)
          .betas({s.beta1, s.beta2})
          .eps(s.eps)
          .weight_decay(s.weight_decay);
  }
}

}  // namespace muster::soak
