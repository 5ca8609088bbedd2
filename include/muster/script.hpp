// TorchScript: models made in Python, trained here, and given back to Python.
//
//   # in Python                                        torch.jit.script(Net()).save("net.pt")
//   auto net = session.prepare_model(muster::load_script("net.pt"));
//   …
//   auto loss = criterion(net->forward(x), y);         // like any other model
//   …
//   if (session.world_rank() == 0) net->save("trained.pt", {.replace = true});
//   # in Python                                        net = torch.jit.load("trained.pt")
//
// A TorchScript file is a program: load only what you would run. The program can do what TorchScript can: compute, but
// not read other files. A model made by torch.jit.trace computes as it was traced, in training and evaluation alike.
//
// This header needs torch's modules, so muster.hpp leaves it out.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/weights.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace torch::jit {
struct Module;
}

namespace muster {

/// A scripted module as a torch module: optimizers, State, prepare_model and Evaluation accept it like any other. Its
/// submodules are ScriptModules too, so parameters and buffers have the names of Python's state_dict().
///
/// The module shares its parameters with the program, so the program computes with the values that each step writes.
/// train() and eval() set the program's `training`, and to() moves or converts the program's tensors.
class MUSTER_API ScriptModuleImpl : public torch::nn::Module {
 public:
  /// Wraps `script`: the same program and tensors. Run the program only through this module from now on.
  explicit ScriptModuleImpl(const torch::jit::Module& script);
  ~ScriptModuleImpl() override;

  /// Calls the program's forward() with one tensor; an Error (ExitCode::usage) if it returns anything but one tensor.
  at::Tensor forward(const at::Tensor& input);
  /// Calls any method of the program, with any values: auto out = net->call({x, state}).toTuple();
  c10::IValue call(std::vector<c10::IValue> inputs, const std::string& method = "forward");

  /// Writes the program with its present tensors, for Python's torch.jit.load() and for load_script(). The file appears
  /// only when it is complete and on the disk. A program on a GPU is written as one on the CPU. Acts on the calling
  /// rank only; values that differ between ranks, such as batch-norm's statistics, are this rank's.
  void save(const std::filesystem::path& file, const ExportOptions& options = {});
  using torch::nn::Module::save;  // into an archive of torch::save

  void train(bool on = true) override;
  bool is_training() const noexcept override;

 private:
  struct Program;
  struct Known;

  ScriptModuleImpl(const torch::jit::Module& script, Known& known);
  void take(Known& known);
  void share_buffers();

  std::unique_ptr<Program> program_;
};
TORCH_MODULE(ScriptModule);

/// Returns the module in a file of torch.jit.save(), on the CPU. An Error (ExitCode::data) that names the file if it
/// does not exist, holds something else (such as a state dict), is damaged, or if its program needs code that is not
/// linked in. Acts on the calling rank only.
MUSTER_API ScriptModule load_script(const std::filesystem::path& file);

}  // namespace muster
