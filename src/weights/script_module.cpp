// Loads TorchScript programs as modules.
#include "muster/error.hpp"
#include "muster/script.hpp"
#include "weights/weights_file.hpp"

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string_view>
#include <utility>

namespace muster {
namespace {

using namespace detail::weights;

/// Returns the name of the class without its namespace: "Net" for "__torch__.models.Net".
std::string class_name(const torch::jit::Module& script) { return script.type()->name()->name(); }

const void* identity(const torch::jit::Module& script) { return script._ivalue().get(); }

/// Returns the first line that is not empty. Torch's messages continue with the position in the program.
std::string first_line(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \n"), text.size()));
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

struct ScriptModuleImpl::Program {
  /// A buffer of the program and of the module. The program may replace its tensor, but a module keeps the tensor that
  /// was registered. So there are two tensors that share their memory.
  struct Buffer {
    std::string name;
    at::Tensor of_module, of_program;
  };

  torch::jit::Module script;
  std::vector<Buffer> buffers = {};                           ///< of this module, without its submodules
  std::vector<std::shared_ptr<ScriptModuleImpl>> parts = {};  ///< submodules, each listed once
};

/// Modules by their script object, so that a submodule that is used in several places becomes one module.
struct ScriptModuleImpl::Known : std::map<const void*, std::shared_ptr<ScriptModuleImpl>> {};

ScriptModuleImpl::ScriptModuleImpl(const torch::jit::Module& script)
    : torch::nn::Module(class_name(script)), program_(new Program{script}) {
  Known known;
  take(known);
}

ScriptModuleImpl::ScriptModuleImpl(const torch::jit::Module& script, Known& known)
    : torch::nn::Module(class_name(script)), program_(new Program{script}) {
  take(known);
}

ScriptModuleImpl::~ScriptModuleImpl() = default;

void ScriptModuleImpl::take(Known& known) {
  const auto& script = program_->script;
  for (const auto& [name, tensor] : script.named_parameters(/*recurse=*/false))
    register_parameter(name, tensor, tensor.requires_grad());
  for (const auto& [name, tensor] : script.named_buffers(/*recurse=*/false)) {
    register_buffer(name, tensor);
    program_->buffers.push_back({name, tensor, tensor});
  }
  for (const auto& [name, part] : script.named_children()) {
    auto& module = known[identity(part)];
    if (!module) {
      module.reset(new ScriptModuleImpl(part, known));
      program_->parts.push_back(module);
    }
    register_module(name, module);
  }
  for (auto& buffer : program_->buffers) {
    buffer.of_program = buffer.of_module.detach();
    program_->script.setattr(buffer.name, buffer.of_program);
  }
}

/// Lets program and module share the memory of their buffers again, if either has replaced it since the last call.
void ScriptModuleImpl::share_buffers() {
  for (auto& [name, of_module, of_program] : program_->buffers) {
    auto now = program_->script.attr(name).toTensor();
    if (!now.is_same(of_program)) {
      of_module.set_data(now.detach());
      of_program = std::move(now);
    } else if (!of_module.is_alias_of(of_program)) {
      of_program = of_module.detach();
      program_->script.setattr(name, of_program);
    }
  }
  for (const auto& part : program_->parts) part->share_buffers();
}

at::Tensor ScriptModuleImpl::forward(const at::Tensor& input) {
  auto output = call({input});
  if (!output.isTensor())
    throw Error(ExitCode::usage, "running a TorchScript module", name() + " gives a " + output.tagKind(),
                "Run it with call(), which gives any value");
  return std::move(output).toTensor();
}

c10::IValue ScriptModuleImpl::call(std::vector<c10::IValue> inputs, const std::string& method) {
  share_buffers();
  auto output = program_->script.get_method(method)(std::move(inputs));
  share_buffers();
  return output;
}

void ScriptModuleImpl::save(const std::filesystem::path& file, const ExportOptions& options) {
  share_buffers();
  std::uint64_t total = 0;
  bool on_cpu = true;
  auto tensors = parameters();
  const auto of_buffers = buffers();
  tensors.insert(tensors.end(), of_buffers.begin(), of_buffers.end());
  for (const auto& tensor : tensors) {
    total += tensor.nbytes();
    on_cpu = on_cpu && tensor.is_cpu();
  }
  const auto script = on_cpu ? program_->script : program_->script.deepcopy(at::kCPU);
  write_weights(file, options, total, [&](const ByteSink& sink) {
    write_archive(sink, [&](const ArchiveSink& archive) { torch::jit::ExportModule(script, archive); });
  });
}

void ScriptModuleImpl::train(bool on) {
  torch::nn::Module::train(on);
  if (program_->script.type()->hasAttribute("training")) program_->script.setattr("training", on);
}

bool ScriptModuleImpl::is_training() const noexcept { return program_->script.is_training(); }

ScriptModule load_script(const std::filesystem::path& file) {
  check_script(file);
  try {
    return ScriptModule(std::make_shared<ScriptModuleImpl>(torch::jit::load(file.string(), at::kCPU)));
  } catch (const std::exception& error) {
    throw_unreadable(file, "torch cannot load its program: " + first_line(error.what()),
                     "Link the library that has its operators, or save it again with the torch version used here");
  }
}

}  // namespace muster
