// TorchScript: models that Python has made, trained here, and given back to it.
//
//   # in Python                                        torch.jit.script(Net()).save("net.pt")
//   auto net = session.prepare_model(muster::load_script("net.pt"));
//   …
//   auto loss = criterion(net->forward(x), y);         // as of any other model
//   …
//   if (session.world_rank() == 0) net->save("trained.pt", {.replace = true});
//   # in Python                                        net = torch.jit.load("trained.pt")
//
// A file of TorchScript is a program: load only what you would run. The program may do whatever TorchScript can, which
// is to compute, and to read no other file. What was made by torch.jit.trace computes as it was traced, in training and
// in evaluation alike.
//
// This header needs torch's modules, so muster.hpp leaves it out.
#pragma once

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

/// A scripted module as a module of torch's: an optimizer, a State, prepare_model and Evaluation take it as any other.
/// Its parts are such modules too, so parameters and buffers have the names that Python's state_dict() has.
///
/// The parameters are the program's own: it sees every step. Its train(), eval() and to() set the program's `training`
/// and its tensors.
class ScriptModuleImpl : public torch::nn::Module {
 public:
  /// The same program and tensors as `script`, which is run through this from now on.
  explicit ScriptModuleImpl(const torch::jit::Module& script);
  ~ScriptModuleImpl() override;

  /// Its forward(), from one tensor to one; an Error (ExitCode::usage) if it gives something else.
  at::Tensor forward(const at::Tensor& input);
  /// Any of its methods, of any values: auto out = net->call({x, state}).toTuple();
  c10::IValue call(std::vector<c10::IValue> inputs, const std::string& method = "forward");

  /// Writes the program with the tensors that it has now, for Python's torch.jit.load() and for load_script(). The file
  /// is there when it is whole and on the disk, or not at all. From a GPU it is written as from the CPU. On the calling
  /// rank alone; what differs over the ranks, which batch-norm's statistics do, is this rank's.
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

/// The module in a file of torch.jit.save(), on the CPU. An Error (ExitCode::data) names the file if there is none, if
/// it holds something else (a state dict, say), if it is damaged, or if its program needs what is not linked in. On the
/// calling rank alone.
ScriptModule load_script(const std::filesystem::path& file);

}  // namespace muster
