#include "model/fused_update.hpp"

#include "node/kernels.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace muster::model {
namespace {

constexpr std::size_t stretch = 2048;  ///< elements whose averages stay in the first cache

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

/// One parameter: where it lies, and what the step under way does with it.
struct FusedUpdate::Target {
  std::byte* shared = nullptr;
  at::Tensor view = {};                ///< of the shared copy, as the module sees it
  std::vector<std::byte*> state = {};  ///< in the shared memory
  std::vector<at::Tensor> state_views = {};
  std::size_t block = 0, first = 0, count = 0;
  std::int64_t version = -1;  ///< of the parameter after the last step

  // The step under way.
  Rule rule = {};
  const std::byte* from = nullptr;
  const std::byte* state_from[2] = {};
  bool changed = false;  ///< somebody wrote to the parameter since the last step
};

FusedUpdate::~FusedUpdate() = default;

bool FusedUpdate::fits(const std::vector<at::Tensor>& parameters) {
  return std::all_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) {
    return (p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble) && p.is_non_overlapping_and_dense() &&
           p.numel() > 0;
  });
}

std::unique_ptr<FusedUpdate> FusedUpdate::make(SharedExchange& exchange, std::vector<at::Tensor> parameters,
                                               int states) {
  // The parameters, block by block, each block on pages of its own; then the state, then the parts' norms.
  const auto& blocks = exchange.reduction().blocks();
  std::size_t parameter_bytes = 0, state_bytes = 0;
  for (const auto& block : blocks) {
    const auto bytes = block.count * node::size_of(block.type);
    parameter_bytes += round_up(bytes, node::page_size());
    state_bytes += static_cast<std::size_t>(states) * round_up(bytes, node::page_size());
  }
  const auto total = parameter_bytes + state_bytes + exchange.reduction().parts() * sizeof(double);
  const auto ranks = static_cast<std::size_t>(exchange.communicator().size());
  const auto share = round_up((total + ranks - 1) / ranks, node::page_size());
  auto region = comm::share(exchange.communicator(), share, share);
  if (!region) return nullptr;
  return std::unique_ptr<FusedUpdate>(
      new FusedUpdate(exchange, std::move(parameters), states, std::move(*region), parameter_bytes));
}

FusedUpdate::FusedUpdate(SharedExchange& exchange, std::vector<at::Tensor> parameters, int states,
                         comm::SharedRegion region, std::size_t parameter_bytes)
    : exchange_(&exchange),
      parameters_(std::move(parameters)),
      region_(std::move(region)),
      view_(region_.segment->private_view(0, parameter_bytes)),
      targets_(parameters_.size()),
      blocks_(exchange.reduction().blocks().size()) {
  const at::NoGradGuard no_grad;
  const auto& reduced = exchange.reduction().blocks();
  std::vector<std::size_t> parameters_at, state_at;
  std::size_t at = 0, after = parameter_bytes;
  for (const auto& block : reduced) {
    const auto bytes = round_up(block.count * node::size_of(block.type), node::page_size());
    parameters_at.push_back(at);
    state_at.push_back(after);
    at += bytes;
    after += static_cast<std::size_t>(states) * bytes;
  }
  norms_at_ = after;

  std::byte* const base = region_.region.base;
  const auto placements = exchange.placements();
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    const auto& parameter = parameters_[i];
    const auto& block = reduced[placements[i].block];
    const auto offset = placements[i].first * node::size_of(block.type);
    target.block = placements[i].block;
    target.first = placements[i].first;
    target.count = placements[i].count;
    target.shared = base + parameters_at[target.block] + offset;
    const auto options = parameter.options().requires_grad(false);
    target.view = at::from_blob(
        view_.get() + parameters_at[target.block] + offset, parameter.sizes(), parameter.strides(),
        [view = view_](void*) {}, options);
    for (int s = 0; s < states; ++s) {
      const auto bytes = round_up(block.count * node::size_of(block.type), node::page_size());
      target.state.push_back(base + state_at[target.block] + static_cast<std::size_t>(s) * bytes + offset);
      target.state_views.push_back(at::from_blob(
          target.state.back(), parameter.sizes(), parameter.strides(), [segment = region_.segment](void*) {}, options));
    }
    blocks_[target.block].push_back(i);
    // The same values on all ranks; one of them puts them there.
    if (region_.local_rank == 0) std::memcpy(target.shared, parameter.const_data_ptr(), parameter.nbytes());
  }
  for (auto& block : blocks_)
    std::sort(block.begin(), block.end(), [&](auto a, auto b) { return targets_[a].first < targets_[b].first; });
  exchange.communicator().barrier();
  for (auto& target : targets_) target.changed = true;
  show();
}

/// Lets the module see what is in the shared copy.
void FusedUpdate::show() {
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    auto& parameter = parameters_[i];
    if (std::exchange(target.changed, false)) {
      // Drops this rank's own pages; neighbours on them are the same in the shared copy.
      auto* const first = static_cast<std::byte*>(target.view.data_ptr());
      const auto offset = static_cast<std::size_t>(first - view_.get());
      const auto page = node::page_size();
      const auto begin = offset / page * page, end = round_up(offset + parameter.nbytes(), page);
      node::SharedSegment::drop_private_pages(view_.get() + begin, end - begin);
      if (parameter.const_data_ptr() != target.view.const_data_ptr()) parameter.set_data(target.view);
    }
    torch::autograd::impl::bump_version(parameter);
    target.version = static_cast<std::int64_t>(parameter._version());
  }
}

/// What was written to a parameter since the last step is seen by its version, and what went around that (.data()) by
/// some of its elements.
void FusedUpdate::find_changes() {
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    const auto& parameter = parameters_[i];
    target.from = static_cast<const std::byte*>(parameter.const_data_ptr());
    const auto element = static_cast<std::size_t>(parameter.element_size());
    const auto differs = [&](std::size_t at) {
      return std::memcmp(target.from + at * element, target.shared + at * element, element) != 0;
    };
    target.changed = static_cast<std::int64_t>(parameter._version()) != target.version ||
                     target.from != target.view.const_data_ptr() || differs(0) || differs(target.count / 3) ||
                     differs(target.count / 3 * 2) || differs(target.count - 1);
  }
  // Pages are dropped whole, so all of a block is taken over if one of its parameters was changed.
  for (const auto& block : blocks_)
    if (std::any_of(block.begin(), block.end(), [&](auto i) { return targets_[i].changed; }))
      for (const auto i : block) targets_[i].changed = true;
}

void FusedUpdate::prepare(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  auto rules = next_rules(optimizer, parameters_);
  find_changes();
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    target.rule = std::move(rules[i]);
    std::fill(std::begin(target.state_from), std::end(target.state_from), nullptr);
    for (std::size_t s = 0; s < target.rule.state.size(); ++s) {
      auto& state = target.rule.state[s];
      const auto& like = target.view;
      if (!state.is_cpu() || state.scalar_type() != like.scalar_type() || state.strides() != like.strides())
        state = at::empty_strided(like.sizes(), like.strides(), like.options()).copy_(state);
      target.state_from[s] = static_cast<const std::byte*>(state.const_data_ptr());
    }
  }
}

double FusedUpdate::step(torch::optim::Optimizer& optimizer, double max_norm) {
  const at::NoGradGuard no_grad;
  const double whole = max_norm > 0 ? norm() : 0;
  const double ranks = exchange_->communicator().size();
  const double scale = (max_norm > 0 ? std::min(1.0, max_norm / (whole + 1e-6)) : 1.0) / ranks;
  exchange_->update([&](const node::BlockReduction::Part& part, std::span<std::byte* const> gradients) {
    update_part(part, gradients, scale);
  });
  for (std::size_t i = 0; i < targets_.size(); ++i)
    if (exchange_->users(i) > 0) commit(optimizer, parameters_[i], targets_[i].rule, targets_[i].state_views);
  show();
  return whole;
}

/// The 2-norm of all averaged gradients, from the parts' sums of squares in their order: the same bits on every rank.
double FusedUpdate::norm() {
  auto* const sums = reinterpret_cast<double*>(region_.region.base + norms_at_);
  const double scale = 1.0 / exchange_->communicator().size();
  exchange_->update([&](const node::BlockReduction::Part& part, std::span<std::byte* const> gradients) {
    const auto type = exchange_->reduction().blocks()[part.block].type;
    const auto element = node::size_of(type);
    double sum = 0;
    alignas(64) double averages[stretch];  // or floats
    for (std::size_t done = 0; done < part.count; done += stretch) {
      const auto n = std::min(stretch, part.count - done);
      std::vector<const void*> sources;
      for (auto* gradient : gradients) sources.push_back(gradient + done * element);
      void* const target = averages;
      node::reduce_arrays(std::span(&target, 1), sources, n, {.type = type, .scale = scale});
      sum += type == node::Dtype::f32 ? sum_of_squares(reinterpret_cast<const float*>(averages), n)
                                      : sum_of_squares(averages, n);
    }
    sums[part.number] = sum;
  });
  double sum = 0;
  for (std::size_t p = 0; p < exchange_->reduction().parts(); ++p) sum += sums[p];
  return std::sqrt(sum);
}

void FusedUpdate::update_part(const node::BlockReduction::Part& part, std::span<std::byte* const> gradients,
                              double scale) {
  const auto type = exchange_->reduction().blocks()[part.block].type;
  const auto element = node::size_of(type);
  for (const auto i : blocks_[part.block]) {
    auto& target = targets_[i];
    const auto begin = std::max(part.first, target.first);
    const auto end = std::min(part.first + part.count, target.first + target.count);
    if (begin >= end) continue;
    const auto first = begin - target.first, count = end - begin;
    if (exchange_->users(i) <= 0) {
      if (target.changed) std::memcpy(target.shared + first * element, target.from + first * element, count * element);
      continue;
    }
    std::vector<const void*> sources;
    for (auto* gradient : gradients) sources.push_back(gradient + (begin - part.first) * element);
    if (type == node::Dtype::f32)
      update_stretch<float>(target, first, count, sources, scale);
    else
      update_stretch<double>(target, first, count, sources, scale);
  }
}

template <class T>
void FusedUpdate::update_stretch(Target& target, std::size_t first, std::size_t count,
                                 std::span<const void* const> gradients, double scale) {
  alignas(64) T averages[stretch];
  std::vector<const void*> sources(gradients.size());
  for (std::size_t done = 0; done < count; done += stretch) {
    const auto n = std::min(stretch, count - done), at = first + done;
    for (std::size_t r = 0; r < sources.size(); ++r) sources[r] = static_cast<const T*>(gradients[r]) + done;
    void* const average = averages;
    node::reduce_arrays(std::span(&average, 1), sources, n,
                        {.type = sizeof(T) == 4 ? node::Dtype::f32 : node::Dtype::f64, .scale = scale});
    Stretch<T> s{.gradient = averages,
                 .from = reinterpret_cast<const T*>(target.from) + at,
                 .to = reinterpret_cast<T*>(target.shared) + at,
                 .count = n};
    for (std::size_t k = 0; k < target.state.size(); ++k) {
      s.state_to[k] = reinterpret_cast<T*>(target.state[k]) + at;
      s.state_from[k] =
          target.state_from[k] == nullptr ? s.state_to[k] : reinterpret_cast<const T*>(target.state_from[k]) + at;
    }
    std::visit([&](const auto& rule) { update(rule, s); }, target.rule.rule);
  }
}

}  // namespace muster::model
