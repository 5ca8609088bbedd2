// Recomputes activations in backward() instead of keeping them: less memory for more time.
//
//   x = muster::recompute(net->stage1, x);                                  // a module
//   x = muster::recompute([&](const at::Tensor& x, const at::Tensor& mask) {  // or anything that can be called
//     return net->attention->forward(net->norm->forward(x), mask);
//   }, x, mask);
//
// The block runs now, and only its inputs are kept. In backward() it runs once more, and the gradients are computed
// from that run: with the same random numbers (torch's default generators), under the same autocast, with a module in
// the same mode (training or evaluation). They have the same bits as without recompute(), unless more than two
// gradients of one tensor come from inside and outside of the block: these are added in another order.
#pragma once

#include <muster/detail/export.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster {

namespace detail::recomputation {

using Tensors = std::vector<at::Tensor>;
using Block = std::function<Tensors(const Tensors& inputs)>;

/// Implements muster::recompute(). `module`: the module whose buffers the block may write to; may be null.
MUSTER_API Tensors recompute(Block block, Tensors inputs, std::shared_ptr<torch::nn::Module> module);

}  // namespace detail::recomputation

/// Returns block(inputs…): a tensor, or a tuple or vector of tensors. `block` is a module (holder or shared_ptr), whose
/// forward() is called, or a callable. A callable is copied and called again in backward(); what it refers to must live
/// until then. Other tensors, parameters and modules that the block uses need not be passed.
///
/// The block must compute the same both times, from the values that its inputs and parameters have now: neither the
/// block nor later code may write to them before backward(). A block that returns another shape or uses another
/// parameter the second time is an Error (ExitCode::user_error) in backward(). So is a parameter that was written to;
/// for an input that was written to, torch throws its own error. Writes to parameters and inputs are noticed only if
/// torch counts them: it does not count the step of an optimizer that is not prepared. Buffers that a module writes to,
/// such as batch-norm's statistics, are written once; those of other callables are written twice. Modules that a
/// callable uses must be in the same mode both times.
///
/// Blocks may be nested. If nothing in it needs a gradient, a block is computed once, as without recompute(). Gradients
/// of gradients are an Error (ExitCode::usage).
template <class Block, std::convertible_to<at::Tensor>... Inputs>
auto recompute(Block block, const Inputs&... inputs) {
  std::shared_ptr<torch::nn::Module> module;
  if constexpr (requires { block.ptr(); })
    module = block.ptr();
  else if constexpr (std::convertible_to<Block, std::shared_ptr<torch::nn::Module>>)
    module = block;
  auto run = [block = std::move(block)](const detail::recomputation::Tensors& given) mutable {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      if constexpr (requires { block->forward(given[i]...); })
        return block->forward(given[i]...);
      else
        return block(given[i]...);
    }
    (std::index_sequence_for<Inputs...>());
  };
  detail::recomputation::Tensors given{at::Tensor(inputs)...};
  using Output = decltype(run(given));
  if constexpr (std::same_as<Output, detail::recomputation::Tensors>) {
    return detail::recomputation::recompute(std::move(run), std::move(given), std::move(module));
  } else if constexpr (std::same_as<Output, at::Tensor>) {
    auto one = [run](const detail::recomputation::Tensors& again) mutable {
      return detail::recomputation::Tensors{run(again)};
    };
    return detail::recomputation::recompute(std::move(one), std::move(given), std::move(module)).front();
  } else {
    auto all = [run](const detail::recomputation::Tensors& again) mutable {
      return std::apply([](const auto&... each) { return detail::recomputation::Tensors{each...}; }, run(again));
    };
    const auto made = detail::recomputation::recompute(std::move(all), std::move(given), std::move(module));
    return [&]<std::size_t... i>(std::index_sequence<i...>) { return Output(made[i]...); }
    (std::make_index_sequence<std::tuple_size_v<Output>>());
  }
}

}  // namespace muster
