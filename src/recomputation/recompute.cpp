// Activation recomputation (Chen, Xu, Zhang and Guestrin, 2016): one autograd node stands for a whole block of
// operations.
//
// In the forward pass, the block's graph is built, searched for the edges on which gradients leave it, and freed. In
// backward(), the node builds the graph again, connects these edges to collectors, runs an inner backward(), and
// returns the collected gradients as its own. So each gradient is accumulated only once, in the outer backward(), and
// hooks do not see the inner one.
#include "muster/recompute.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

namespace muster::detail::recomputation {
namespace {

namespace autograd = torch::autograd;

constexpr const char* recomputing = "computing a block again";

/// What a block's results depend on besides tensors: the states of the default generators, autocast with its cache
/// setting, and the training mode of each part of a module.
class ComputeContext {
 public:
  /// Records the present state. `module` may be null.
  explicit ComputeContext(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {
    // Parents come before their children, since train() of a parent also changes its children.
    if (module_)
      for (const auto& part : module_->modules()) modes_.emplace_back(part, part->is_training());
    record_generator(at::kCPU);
    for (c10::DeviceIndex gpu = 0; at::hasCUDA() && gpu < c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount(); ++gpu)
      if (at::detail::getCUDAHooks().hasPrimaryContext(gpu)) record_generator({at::kCUDA, gpu});
    caches_casts_ = at::autocast::is_autocast_cache_enabled();
    for (const auto type : {at::kCPU, at::kCUDA})
      casts_.push_back({type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }

  const std::shared_ptr<torch::nn::Module>& module() const noexcept { return module_; }

  void restore() const {
    for (const auto& [part, training] : modes_)
      if (part->is_training() != training) part->train(training);
    for (auto [generator, state] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
    at::autocast::set_autocast_cache_enabled(caches_casts_);
    for (const auto& [type, enabled, dtype] : casts_) {
      at::autocast::set_autocast_enabled(type, enabled);
      at::autocast::set_autocast_dtype(type, dtype);
    }
  }

 private:
  struct Cast {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };

  void record_generator(at::Device device) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generators_.emplace_back(generator, generator.get_state());
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::vector<Cast> casts_;
  bool caches_casts_ = true;
};

/// Restores a ComputeContext while it lives, and afterwards the context from before. Autocast's cached casts are not
/// shared between inside and outside, since they belong to different graphs.
class ScopedComputeContext {
 public:
  explicit ScopedComputeContext(const ComputeContext& there) : before_(there.module()) {
    at::autocast::clear_cache();
    there.restore();
  }
  ~ScopedComputeContext() {
    at::autocast::clear_cache();
    before_.restore();
  }

 private:
  ComputeContext before_;
};

/// If the node accumulates the gradient of a leaf, returns how often the leaf has been written to; otherwise, and for
/// an inference tensor, 0.
std::uint32_t writes_to_leaf(const autograd::Node* node) {
  const auto* const leaf = dynamic_cast<const autograd::AccumulateGrad*>(node);
  return leaf && !leaf->variable.is_inference() ? leaf->variable._version() : 0;
}

/// If autocast is on and caches casts, and the node casts a float leaf to autocast's type, returns the node that
/// accumulates the leaf's gradient; else null.
const autograd::AccumulateGrad* leaf_of_cast(const autograd::Node& node) {
  if (node.num_outputs() != 1 || !at::autocast::is_autocast_cache_enabled()) return nullptr;
  const auto* const leaf = dynamic_cast<const autograd::AccumulateGrad*>(node.next_edge(0).function.get());
  if (leaf == nullptr || node.name() != "ToCopyBackward0") return nullptr;
  if (!at::autocast::is_autocast_enabled(leaf->variable.device().type())) return nullptr;
  const auto type = at::autocast::get_autocast_dtype(leaf->variable.device().type());
  return leaf->variable.scalar_type() == at::kFloat && node.input_metadata(0).dtype() == type ? leaf : nullptr;
}

/// True if autocast's cache has the result of this cast of a leaf. If the cache has none, the leaf is cast once more.
bool is_cached(const autograd::Node& cast, const at::Tensor& leaf) {
  const auto device = leaf.device().type();
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), leaf, device).grad_fn().get() == &cast;
}

/// A place where gradients leave a block: a parameter, its cast that is shared with other operations, an earlier
/// tensor, or one of the block's inputs.
struct GradientExit {
  const autograd::Node* node = nullptr;  ///< null for an input; for a shared cast, the node of its parameter
  std::uint32_t number = 0;              ///< which of the node's gradients it is; for an input, its index
  bool is_cast = false;                  ///< true for the shared cast of a parameter
  auto operator<=>(const GradientExit&) const = default;
};

/// One execution of a block, with its graph.
class Execution {
 public:
  /// `casts`: for the second execution, the leaves whose casts the first one has shared with operations outside of the
  /// block.
  Execution(const Block& block, const Tensors& inputs, const std::vector<bool>& needs_gradient,
            std::optional<std::set<const autograd::Node*>> casts = {})
      : casts_(std::move(casts)) {
    const at::AutoGradMode grad(true);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      leaves_.push_back(detached(inputs[i]));
      if (!needs_gradient[i] || leaves_[i].requires_grad()) continue;
      leaves_[i].set_requires_grad(true);
      input_of_[autograd::impl::gradient_edge(leaves_[i]).function] = static_cast<std::uint32_t>(i);
    }
    first_ = at::sequence_number::peek();
    outputs = block(leaves_);
    for (const auto& output : outputs)
      roots.push_back(output.defined() && output.requires_grad() ? autograd::impl::gradient_edge(output)
                                                                 : autograd::Edge());
    find_ends();
  }

  /// An exit, and the edges that lead to it.
  struct End {
    GradientExit exit;
    std::vector<autograd::Edge*> edges;
  };

  Tensors outputs;
  std::vector<autograd::Edge> roots;  ///< [outputs]; an edge is invalid if the output needs no gradient
  std::vector<End> ends;              ///< in the order in which they were found

 private:
  /// Returns the input without its history. A leaf is returned unchanged, like a parameter that the block uses. Other
  /// inputs become views, for which autocast does not cache casts.
  static at::Tensor detached(const at::Tensor& input) {
    if (!input.defined() || (input.is_leaf() && input.requires_grad())) return input;
    const at::NoGradGuard no_grad;
    return input.detach().alias();
  }
  /// True if this execution has made the node. Nodes of parameters have the greatest possible number, and nodes of
  /// another thread do not belong to the block.
  bool is_own(const autograd::Node& node) const {
    return node.sequence_nr() >= first_ && node.sequence_nr() != std::numeric_limits<std::uint64_t>::max() &&
           node.thread_id() == thread_;
  }

  /// If the node is a cast of a parameter that operations outside of the block use, too, returns the node that
  /// accumulates the parameter's gradient; else null. The gradients of all uses are then added up in the type of the
  /// cast.
  const autograd::Node* leaf_of_shared_cast(const autograd::Node& node) const {
    const auto* const leaf = leaf_of_cast(node);
    if (leaf == nullptr) return nullptr;
    const bool is_shared = casts_ ? casts_->contains(leaf) : !is_own(node) || is_cached(node, leaf->variable);
    return is_shared ? leaf : nullptr;
  }

  void find_ends() {
    std::map<GradientExit, std::size_t> known;
    std::unordered_set<const autograd::Node*> seen;
    std::vector<autograd::Node*> pending;
    const auto follow = [&](autograd::Edge& edge) {
      if (!edge.is_valid()) return;
      auto* const node = edge.function.get();
      const auto* const leaf = leaf_of_shared_cast(*node);
      if (leaf == nullptr && is_own(*node)) {
        if (seen.insert(node).second) pending.push_back(node);
        return;
      }
      const auto input = input_of_.find(edge.function);
      const auto exit = leaf != nullptr            ? GradientExit{leaf, 0, true}
                        : input == input_of_.end() ? GradientExit{node, edge.input_nr}
                                                   : GradientExit{nullptr, input->second};
      const auto [at, is_new] = known.try_emplace(exit, ends.size());
      if (is_new) ends.push_back({exit, {}});
      ends[at->second].edges.push_back(&edge);
    };
    for (auto& root : roots) follow(root);
    while (!pending.empty()) {
      auto* const node = pending.back();
      pending.pop_back();
      for (auto& edge : node->next_edges()) follow(edge);
      // The node of a write to a part of a tensor contains another node, which has the same edges except for the first
      // one.
      if (auto* const slices = dynamic_cast<autograd::CopySlices*>(node))
        for (std::size_t i = 1; i < slices->fn->next_edges().size(); ++i) follow(slices->fn->next_edges()[i]);
    }
  }

  std::optional<std::set<const autograd::Node*>> casts_;
  Tensors leaves_;
  /// Index of the input, by the node of its leaf, which is kept alive here.
  std::map<decltype(autograd::Edge::function), std::uint32_t> input_of_;
  std::uint64_t first_ = 0, thread_ = at::RecordFunction::currentThreadId();
};

/// A node at the end of a graph that stores the gradient that it gets.
struct Collector final : autograd::Node {
  at::Tensor gradient;

  explicit Collector(const autograd::InputMetadata& like) {
    add_input_metadata(at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector()));
  }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    gradient = std::move(gradients[0]);
    return {};
  }
};

/// Saves a module's buffers, and restores them when it is destroyed, since the second execution may change them.
class BufferGuard {
 public:
  explicit BufferGuard(const std::shared_ptr<torch::nn::Module>& module) {
    if (!module) return;
    for (const auto& buffer : module->buffers())
      if (buffer.defined()) values_.emplace_back(buffer, buffer.detach().clone());
  }
  ~BufferGuard() {
    const at::NoGradGuard no_grad;
    // Written without raising autograd's version count, as batch-norm does, since autograd may have saved the buffers.
    for (const auto& [buffer, value] : values_)
      if (buffer.sizes() == value.sizes())
        buffer.variable_data().copy_(value);
      else
        buffer.set_data(value);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;
};

class Recompute final : public autograd::Node {
 public:
  Recompute(Block block, std::vector<autograd::SavedVariable> inputs, std::vector<bool> needs_gradient,
            ComputeContext compute_context)
      : block_(std::move(block)),
        inputs_(std::move(inputs)),
        needs_gradient_(std::move(needs_gradient)),
        compute_context_(std::move(compute_context)) {}

  /// Takes over the exits of `run`, and returns the outputs without their history. The caller makes this node their
  /// grad_fn.
  Tensors replace_graph(Execution& run, const Tensors& inputs) {
    for (const auto& [exit, edges] : run.ends) {
      add_next_edge(exit.node ? *edges.front() : autograd::impl::gradient_edge(inputs[exit.number]));
      exits_.push_back(exit);
      writes_.push_back(writes_to_leaf(exit.node));
    }
    Tensors outputs;
    for (std::size_t i = 0; i < run.outputs.size(); ++i) {
      const auto& output = run.outputs[i];
      outputs.push_back(run.roots[i].is_valid() ? output.tensor_data() : output);
      shapes_.push_back(output.defined() ? output.sizes().vec() : std::vector<std::int64_t>());
    }
    return outputs;
  }

  std::string name() const override { return "muster::recompute"; }

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (at::GradMode::is_enabled())
      throw Error(ExitCode::usage, recomputing, "gradients of gradients were requested",
                  "Call backward() without create_graph, or the block without recompute()");
    if (!block_)
      throw Error(ExitCode::user_error, recomputing, "backward() has run through it already",
                  "Keep the graph in the first backward(): backward({}, /*retain_graph=*/true)");
    Tensors inputs;
    for (const auto& saved : inputs_) inputs.push_back(saved.unpack());
    for (std::size_t i = 0; i < exits_.size(); ++i)
      if (writes_to_leaf(exits_[i].node) != writes_[i])
        throw Error(ExitCode::user_error, recomputing, "a parameter of it has been written to since the forward pass",
                    "Call backward() before the optimizer's step, and outside of EMA::apply()");
    const BufferGuard buffer_guard(compute_context_.module());
    auto run = run_again(inputs);
    check(run);

    std::vector<c10::intrusive_ptr<Collector>> collectors(exits_.size());
    for (const auto& [exit, edges] : run.ends) {
      auto& collector = collectors[index_of(exit)];
      collector = c10::make_intrusive<Collector>(edges.front()->function->input_metadata(edges.front()->input_nr));
      for (auto* const edge : edges) *edge = {collector, 0};
    }
    autograd::edge_list roots;
    autograd::variable_list given;
    for (std::size_t i = 0, output = 0; i < run.roots.size(); ++i) {
      if (!run.roots[i].is_valid()) continue;
      auto& gradient = gradients[output++];
      if (!gradient.defined()) continue;
      roots.push_back(std::move(run.roots[i]));
      given.push_back(std::move(gradient));
    }
    run.outputs.clear();
    if (!roots.empty())
      autograd::Engine::get_default_engine().execute(roots, given, /*keep_graph=*/false, /*create_graph=*/false,
                                                     /*accumulate_grad=*/true);
    autograd::variable_list found;
    for (const auto& collector : collectors) found.push_back(collector ? std::move(collector->gradient) : at::Tensor());
    return found;
  }

  void release_variables() override {
    inputs_.clear();
    block_ = nullptr;
  }

 private:
  Execution run_again(const Tensors& inputs) const {
    std::set<const autograd::Node*> casts;
    for (const auto& exit : exits_)
      if (exit.is_cast) casts.insert(exit.node);
    const ScopedComputeContext inside(compute_context_);
    return {block_, inputs, needs_gradient_, std::move(casts)};
  }

  /// Returns the index of the exit among this node's gradients; the number of gradients if the exit is not among them.
  std::size_t index_of(const GradientExit& exit) const {
    return static_cast<std::size_t>(std::ranges::find(exits_, exit) - exits_.begin());
  }

  void check(const Execution& run) const {
    const auto refuse = [](const std::string& fact) {
      throw Error(ExitCode::user_error, recomputing, fact,
                  "Let it depend only on its inputs, on parameters and on torch's default generators");
    };
    if (run.outputs.size() != shapes_.size())
      refuse(str("it has made ", run.outputs.size(), " tensors, but ", shapes_.size(), " in the forward pass"));
    std::size_t num_roots = 0;
    for (std::size_t i = 0; i < shapes_.size(); ++i) {
      num_roots += run.roots[i].is_valid();
      const auto& output = run.outputs[i];
      if (output.defined() && output.sizes() != at::IntArrayRef(shapes_[i]))
        refuse(c10::str("it has made ", output.sizes(), ", but ", at::IntArrayRef(shapes_[i]), " in the forward pass"));
    }
    const bool known =
        std::ranges::all_of(run.ends, [&](const auto& end) { return index_of(end.exit) < exits_.size(); });
    if (num_roots != num_inputs() || !known || run.ends.size() != exits_.size())
      refuse("its results depend on other tensors than in the forward pass");
  }

  Block block_;
  std::vector<autograd::SavedVariable> inputs_;
  std::vector<bool> needs_gradient_;  ///< [inputs], true if the input needs a gradient
  ComputeContext compute_context_;
  std::vector<GradientExit> exits_;    ///< in the order of this node's edges
  std::vector<std::uint32_t> writes_;  ///< [exits], how often the leaf had been written to when the forward pass ran
  std::vector<std::vector<std::int64_t>> shapes_;  ///< [outputs]
};

}  // namespace

Tensors recompute(Block block, Tensors inputs, std::shared_ptr<torch::nn::Module> module) {
  if (!at::GradMode::is_enabled()) return block(inputs);
  std::vector<bool> needs_gradient;
  // The inputs are saved before the block runs, so that backward() notices if the block writes to them.
  std::vector<autograd::SavedVariable> saved;
  for (const auto& input : inputs) {
    needs_gradient.push_back(input.defined() && input.requires_grad());
    saved.emplace_back(input.defined() && !input.is_leaf() ? input.detach() : input, false);
  }
  ComputeContext compute_context(std::move(module));
  Execution run(block, inputs, needs_gradient);
  if (std::ranges::none_of(run.roots, [](const auto& root) { return root.is_valid(); })) return std::move(run.outputs);
  const auto node = c10::make_intrusive<Recompute>(std::move(block), std::move(saved), std::move(needs_gradient),
                                                   std::move(compute_context));
  auto outputs = node->replace_graph(run, inputs);
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (run.roots[i].is_valid()) autograd::set_history(outputs[i], node);
  return outputs;
}

}  // namespace muster::detail::recomputation
