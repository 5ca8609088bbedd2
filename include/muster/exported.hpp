// Models made in Python with torch.export, trained here.
//
//   # in Python        torch.export.save(torch.export.export(model.train(), (x,), dynamic_shapes=…), "net.pt2")
//   auto net = session.prepare_model(muster::load_exported("net.pt2"));
//   …
//   auto loss = criterion(net->forward(x), y);         // like any other model
//   …
//   muster::save_torch(muster::state_dict(net), "trained.pt");
//   # in Python        model.load_state_dict(torch.load("trained.pt", weights_only=True))
//
// Export in training mode, model.train(): a file has one mode, and only the training mode has all that training needs.
// train() and eval() switch the mode here. Export without run_decompositions(), which makes programs for inference.
//
// A file holds a graph, no code: nothing in it is executed but operators of `aten` and of ExportedOptions::namespaces,
// and arithmetic of sizes. Files are not trusted; invalid contents are an Error (ExitCode::data) that names the file.
//
// This header needs torch's modules, so muster.hpp leaves it out.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/sync_batch_norm.hpp>
#include <muster/weights.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster {

struct ExportedOptions {
  /// Namespaces of operators that may run besides torch's own, as in {"torchvision"}. The library that registers them
  /// must be linked in or loaded. Allow only operators that do no harm whatever their arguments are.
  std::vector<std::string> namespaces = {};
  /// Operators that draw random numbers, such as randn_like of a variational autoencoder, may run in evaluation, too.
  /// The file does not tell whether they are for training only, as in stochastic depth. So without this option eval()
  /// is an Error for a program that has such an operator. Dropouts do not need it.
  bool keep_random = false;
};

/// An exported program as a torch module: optimizers, State, prepare_model and Evaluation accept it like any other.
/// Parameters and buffers have the names of Python's state_dict(), in submodules of Python's names. Parameters that are
/// tied in Python are one tensor under both names; parameters() lists it twice, so step it with an optimizer of
/// session.prepare_optimizer(), which steps it once. Use it in one thread at a time.
///
/// An input whose shape does not fit the exported shape is an Error (ExitCode::usage) that names the input and the
/// dimension; sizes that are expressions, such as 2 * batch, are not checked. What an operator throws is passed on,
/// with the line of the model's Python source.
class MUSTER_API ExportedModuleImpl : public torch::nn::Module, public detail::gradients::BatchNormOperators {
 public:
  struct Program;
  explicit ExportedModuleImpl(std::shared_ptr<const Program> program);
  ~ExportedModuleImpl() override;

  /// Runs the program for one tensor, and returns its only tensor; an Error (ExitCode::usage) if it takes or returns
  /// anything else.
  at::Tensor forward(const at::Tensor& input);
  /// Runs the program for any inputs, and returns what the model returns in Python: tensors, numbers, tuples, lists and
  /// dicts of them. `inputs` are the arguments of Python's forward() in order, which may be tuples, lists and dicts of
  /// tensors and numbers; `named` are further arguments by their names. Arguments that were constants at export, such
  /// as None, may be left out:
  ///
  ///   auto out = net->call({x}, {{"mask", mask}}).toTuple();
  c10::IValue call(std::vector<c10::IValue> inputs, std::map<std::string, c10::IValue> named = {});

  /// The names of the inputs in Python, in order, without constants. A tuple, list or dict among them has one name for
  /// each of its tensors and numbers.
  const std::vector<std::string>& input_names() const noexcept;

  /// Switches the operators that depend on the mode: batch-norm, instance-norm, dropouts, LSTM, GRU, RNN, attention and
  /// rrelu. In evaluation the program does not count batches. The file does not tell whether F.dropout(x, 0.5) has a
  /// mode of its own, so this dropout follows the module's mode. Of `if self.training:` the file has one branch only.
  ///
  /// An Error (ExitCode::usage) that names the operator, and nothing is changed, if one may depend on the mode and
  /// cannot be switched. A program that was exported in evaluation mode cannot be trained: train() is an Error
  /// (ExitCode::usage).
  void train(bool on = true) override;

  /// Moves parameters, all buffers and constants; constants keep their type. Devices in the graph, as in torch.zeros(3,
  /// device="cpu"), become the model's.
  void to(at::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(at::Device device, bool non_blocking = false) override;

 private:
  struct State;
  void move_others(std::optional<at::Device> device, std::optional<torch::Dtype> dtype);
  void require_synchronisable() const override;
  void synchronise_batch_norms() override;
  std::vector<detail::gradients::SynchronisedOperator*> synchronised_operators() override;

  std::unique_ptr<State> state_;
};
TORCH_MODULE(ExportedModule);

/// Returns the module in a file of torch.export.save(), on the CPU and in the mode in which it was exported. An Error
/// (ExitCode::data) names the file if it does not exist, is damaged, or has a version of the format that muster does
/// not read. If the program needs an operator or object that cannot run here, the Error names that. Acts on the calling
/// rank only.
MUSTER_API ExportedModule load_exported(const std::filesystem::path& file, const ExportedOptions& options = {});

/// Writes the program in the file `program` with the tensors of `state`, by Python's names, for torch.export.load() and
/// load_exported(). `state` must have all parameters and persistent buffers of the program, with their shapes and
/// types; of tied ones, one name is enough. Buffers that are not persistent may be there. Anything else is an Error
/// (ExitCode::data) that lists the names. The written program has the mode of `program`. The file appears only when it
/// is complete and on the disk. Acts on the calling rank only.
///
///   muster::save_exported("net.pt2", muster::state_dict(net), "trained.pt2");
MUSTER_API void save_exported(const std::filesystem::path& program, const StateDict& state,
                              const std::filesystem::path& file, const ExportOptions& options = {});

}  // namespace muster
