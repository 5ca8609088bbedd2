#include "optim/fused_step.hpp"

#include "node/kernels.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace muster::detail::optim {
namespace {

constexpr std::size_t tile_elements = 2048;  ///< elements whose averages stay in the first cache

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

/// One parameter: where it lies, and what the step under way does with it.
struct FusedStep::Target {
  std::byte* shared = nullptr;
  at::Tensor view = {};                ///< of the shared copy, as the module sees it
  std::vector<std::byte*> state = {};  ///< in the shared memory
  std::vector<at::Tensor> state_views = {};
  std::size_t block = 0, first = 0, count = 0;

  // The step under way.
  Rule rule = {};
  const std::byte* from = nullptr;
  const std::byte* state_from[2] = {};  ///< null: the shared memory
};

/// The parameters of a block of the exchange, on pages of their own, and each kind of their state on others.
struct FusedStep::Block {
  /// What is dropped as a whole, since several parameters may lie on a page.
  struct Pages {
    std::size_t first = 0, bytes = 0;  ///< in the shared memory
    bool changed = false;              ///< somebody wrote to them since the last step
  };
  node::Dtype type = node::Dtype::f32;
  Pages parameters;
  std::vector<Pages> states = {};
  std::vector<std::size_t> members = {};  ///< by their place in it
};

FusedStep::~FusedStep() = default;

bool FusedStep::fits(const std::vector<at::Tensor>& parameters) {
  return std::all_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) {
    return (p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble) && p.is_non_overlapping_and_dense() &&
           p.numel() > 0;
  });
}

std::unique_ptr<FusedStep> FusedStep::make(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters,
                                           int states) {
  // The parameters, block by block, each block on pages of its own; then the state, then the parts' norms.
  std::size_t bytes = 0;
  for (const auto& block : gradients.blocks())
    bytes +=
        static_cast<std::size_t>(1 + states) * round_up(block.count * node::size_of(block.type), node::page_size());
  const auto total = bytes + gradients.parts() * sizeof(double);
  const auto ranks = static_cast<std::size_t>(gradients.communicator().size());
  const auto share = round_up((total + ranks - 1) / ranks, node::page_size());
  auto region = comm::share(gradients.communicator(), share, share);
  if (!region) return nullptr;
  return std::unique_ptr<FusedStep>(new FusedStep(gradients, std::move(parameters), states, std::move(*region), bytes));
}

FusedStep::FusedStep(gradients::FusableGradients& gradients, std::vector<at::Tensor> parameters, int states,
                     comm::SharedRegion region, std::size_t bytes)
    : gradients_(&gradients),
      parameters_(std::move(parameters)),
      states_(states),
      region_(std::move(region)),
      bytes_(bytes),
      view_(region_.segment->private_view(0, bytes)),
      dirty_(view_.get(), region_.region.base, bytes),
      targets_(parameters_.size()) {
  const at::NoGradGuard no_grad;
  const auto& reduced = gradients.blocks();
  std::size_t at = 0;
  const auto take = [&at](const node::BlockReduction::Block& block) {
    const auto pages = round_up(block.count * node::size_of(block.type), node::page_size());
    return Block::Pages{std::exchange(at, at + pages), pages};
  };
  for (const auto& block : reduced) blocks_.push_back({block.type, take(block)});
  for (std::size_t b = 0; b < reduced.size(); ++b)
    for (int s = 0; s < states; ++s) blocks_[b].states.push_back(take(reduced[b]));

  std::byte* const base = region_.region.base;
  const auto placements = gradients.placements();
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    const auto& parameter = parameters_[i];
    auto& block = blocks_[placements[i].block];
    const auto offset = placements[i].first * node::size_of(reduced[placements[i].block].type);
    target.block = placements[i].block;
    target.first = placements[i].first;
    target.count = placements[i].count;
    target.shared = base + block.parameters.first + offset;
    const auto view_at = [&](const Block::Pages& pages) {
      return at::from_blob(
          view_.get() + pages.first + offset, parameter.sizes(), parameter.strides(), [view = view_](void*) {},
          parameter.options().requires_grad(false));
    };
    target.view = view_at(block.parameters);
    for (const auto& pages : block.states) {
      target.state.push_back(base + pages.first + offset);
      target.state_views.push_back(view_at(pages));
    }
    block.members.push_back(i);
    // The same values on all ranks; one of them puts them there.
    if (region_.local_rank == 0) std::memcpy(target.shared, parameter.const_data_ptr(), parameter.nbytes());
  }
  for (auto& block : blocks_)
    std::sort(block.members.begin(), block.members.end(),
              [&](auto a, auto b) { return targets_[a].first < targets_[b].first; });
  gradients.communicator().barrier();
  show();
}

/// Lets the module see what is in the shared copy.
void FusedStep::show() {
  const auto show_pages = [this](Block::Pages& pages) {
    if (std::exchange(pages.changed, false))
      node::SharedSegment::drop_private_pages(view_.get() + pages.first, pages.bytes);
  };
  for (auto& block : blocks_) {
    show_pages(block.parameters);
    for (auto& pages : block.states) show_pages(pages);
  }
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& parameter = parameters_[i];
    if (parameter.const_data_ptr() != targets_[i].view.const_data_ptr()) parameter.set_data(targets_[i].view);
    torch::autograd::impl::bump_version(parameter);
  }
}

/// Parameters may have been given other memory, and what is in the view may have been written to, by whatever way.
void FusedStep::find_changes() {
  for (auto& block : blocks_) {
    block.parameters.changed = dirty_.any(block.parameters.first, block.parameters.bytes);
    for (auto& pages : block.states) pages.changed = dirty_.any(pages.first, pages.bytes);
  }
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    auto& parameter = parameters_[i];
    const auto& view = target.view;
    // In the order of the shared copy, in which gradients are given to the exchange too.
    if (parameter.strides() != view.strides())
      parameter.set_data(at::empty_strided(view.sizes(), view.strides(), view.options()).copy_(parameter));
    target.from = static_cast<const std::byte*>(parameter.const_data_ptr());
    if (target.from != view.const_data_ptr()) blocks_[target.block].parameters.changed = true;
  }
}

void FusedStep::prepare(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  auto rules = next_rules(optimizer, parameters_);
  find_changes();
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    auto& target = targets_[i];
    target.rule = std::move(rules[i]);
    std::fill(std::begin(target.state_from), std::end(target.state_from), nullptr);
    for (std::size_t s = 0; s < target.rule.state.size(); ++s) {
      auto& state = target.rule.state[s];
      const auto& like = target.state_views[s];
      if (state.is_same(like) && !blocks_[target.block].states[s].changed) continue;
      if (!state.is_cpu() || state.scalar_type() != like.scalar_type() || state.strides() != like.strides())
        state = at::empty_strided(like.sizes(), like.strides(), like.options()).copy_(state);
      target.state_from[s] = static_cast<const std::byte*>(state.const_data_ptr());
    }
  }
}

double FusedStep::step(torch::optim::Optimizer& optimizer, double max_norm) {
  const at::NoGradGuard no_grad;
  const double whole = max_norm > 0 ? norm() : 0;
  // Who has left the pass takes part in its first round alone.
  if (max_norm > 0 && left()) return whole;
  const double ranks = gradients_->communicator().size();
  const double scale = (max_norm > 0 ? std::min(1.0, max_norm / (whole + 1e-6)) : 1.0) / ranks;
  gradients_->finish_with([&](const node::BlockReduction::Part& part, std::span<std::byte* const> gradients) {
    step_part(part, gradients, scale);
  });
  // The parts that it has worked on lack what was changed by hand, which stays in the view until the next step.
  if (left()) return whole;
  for (std::size_t i = 0; i < targets_.size(); ++i)
    if (gradients_->users(i) > 0) commit(optimizer, parameters_[i], targets_[i].rule, targets_[i].state_views);
  show();
  return whole;
}

bool FusedStep::left() const {
  for (std::size_t i = 0; i < targets_.size(); ++i)
    if (gradients_->users(i) < 0) return true;
  return false;
}

void FusedStep::release(torch::optim::Optimizer& optimizer) const {
  const auto* const begin = view_.get();
  own_state(optimizer, [&](const at::Tensor& state) {
    const auto* const data = static_cast<const std::byte*>(state.const_data_ptr());
    return data >= begin && data < begin + bytes_;
  });
}

/// The 2-norm of all averaged gradients, from the parts' sums of squares in their order: the same bits on every rank.
double FusedStep::norm() {
  auto* const sums = reinterpret_cast<double*>(region_.region.base + bytes_);
  const double scale = 1.0 / gradients_->communicator().size();
  gradients_->finish_with([&](const node::BlockReduction::Part& part, std::span<std::byte* const> gradients) {
    const auto type = blocks_[part.block].type;
    const auto element = node::size_of(type);
    double sum = 0;
    alignas(64) double averages[tile_elements];  // or floats
    for (std::size_t done = 0; done < part.count; done += tile_elements) {
      const auto n = std::min(tile_elements, part.count - done);
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
  for (std::size_t p = 0; p < gradients_->parts(); ++p) sum += sums[p];
  return std::sqrt(sum);
}

void FusedStep::step_part(const node::BlockReduction::Part& part, std::span<std::byte* const> gradients, double scale) {
  const auto type = blocks_[part.block].type;
  const auto element = node::size_of(type);
  const auto& block = blocks_[part.block];
  for (const auto i : block.members) {
    auto& target = targets_[i];
    const auto begin = std::max(part.first, target.first);
    const auto end = std::min(part.first + part.count, target.first + target.count);
    if (begin >= end) continue;
    const auto first = begin - target.first, count = end - begin;
    const bool moves = gradients_->users(i) > 0;
    // What was changed and is not stepped is taken over as it is: its pages are dropped with those of its neighbours.
    const auto take_over = [&](std::byte* to, const void* from) {
      std::memcpy(to + first * element, static_cast<const std::byte*>(from) + first * element, count * element);
    };
    if (!moves && block.parameters.changed) take_over(target.shared, target.from);
    for (std::size_t s = moves ? states_of(target.rule) : 0; s < block.states.size(); ++s)
      if (block.states[s].changed) take_over(target.state[s], target.state_views[s].const_data_ptr());
    if (!moves) continue;
    std::vector<const void*> sources;
    for (auto* gradient : gradients) sources.push_back(gradient + (begin - part.first) * element);
    if (type == node::Dtype::f32)
      step_tiles<float>(target, first, count, sources, scale);
    else
      step_tiles<double>(target, first, count, sources, scale);
  }
}

template <class T>
void FusedStep::step_tiles(Target& target, std::size_t first, std::size_t count, std::span<const void* const> gradients,
                           double scale) {
  alignas(64) T averages[tile_elements];
  std::vector<const void*> sources(gradients.size());
  for (std::size_t done = 0; done < count; done += tile_elements) {
    const auto n = std::min(tile_elements, count - done), at = first + done;
    for (std::size_t r = 0; r < sources.size(); ++r) sources[r] = static_cast<const T*>(gradients[r]) + done;
    void* const average = averages;
    node::reduce_arrays(std::span(&average, 1), sources, n,
                        {.type = sizeof(T) == 4 ? node::Dtype::f32 : node::Dtype::f64, .scale = scale});
    Tile<T> tile{.gradient = averages,
                 .from = reinterpret_cast<const T*>(target.from) + at,
                 .to = reinterpret_cast<T*>(target.shared) + at,
                 .count = n};
    for (std::size_t k = 0; k < target.state.size(); ++k) {
      tile.state_to[k] = reinterpret_cast<T*>(target.state[k]) + at;
      tile.state_from[k] =
          target.state_from[k] == nullptr ? tile.state_to[k] : reinterpret_cast<const T*>(target.state_from[k]) + at;
    }
    std::visit([&](const auto& rule) { update(rule, tile); }, target.rule.rule);
  }
}

}  // namespace muster::detail::optim
