// For exported.py and graphs.py: runs programs of torch.export, and writes what they compute.
//   exported_peer FOLDER CASE…
// For each CASE it reads FOLDER/CASE.pt2 and FOLDER/CASE.in, and writes FOLDER/CASE.out.
#include <torch/torch.h>
#include <muster/exported.hpp>
#include <muster/muster.hpp>

#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using Tensors = c10::Dict<std::string, at::Tensor>;
using Values = c10::impl::GenericDict;

Values values() { return Values(c10::StringType::get(), c10::AnyType::get()); }

IValue read(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  in.exceptions(std::ios::failbit);
  return torch::pickle_load({std::istreambuf_iterator<char>(in), {}});
}

void write(const std::string& file, const IValue& value) {
  const auto bytes = torch::pickle_save(value);
  std::ofstream out(file, std::ios::binary);
  out.exceptions(std::ios::failbit | std::ios::badbit);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// Appends the tensors of a nested value in the order of torch.utils._pytree.
void leaves(const IValue& value, std::vector<at::Tensor>& to) {
  if (value.isTensor()) {
    to.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) leaves(element, to);
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) leaves(element, to);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) leaves(item.value(), to);
  }
}

/// Returns the value with its tensors detached, so that what later runs change is not seen in it.
IValue copy(const IValue& value) {
  if (value.isTensor()) return value.toTensor().detach().resolve_conj().clone();
  if (value.isTuple()) {
    std::vector<IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(copy(element));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const auto& element : value.toListRef()) list.push_back(copy(element));
    return list;
  }
  if (value.isGenericDict()) {
    auto dict = values();
    for (const auto& item : value.toGenericDict()) dict.insert(item.key(), copy(item.value()));
    return dict;
  }
  return value;
}

IValue call(muster::ExportedModule& net, const IValue& arguments, const IValue& named) {
  std::map<std::string, IValue> by_name;
  for (const auto& item : named.toGenericDict()) by_name.emplace(item.key().toStringRef(), item.value());
  return net->call(arguments.toListRef().vec(), std::move(by_name));
}

/// Half the squared sum of all outputs is the loss.
void backward(const IValue& outputs) {
  std::vector<at::Tensor> all, roots, gradients;
  leaves(outputs, all);
  for (const auto& tensor : all)
    if (tensor.requires_grad()) {
      roots.push_back(tensor);
      gradients.push_back(tensor.detach().clone());
    }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

/// The parameters, each once: tied ones have several names.
std::vector<at::Tensor> parameters(muster::ExportedModule& net) {
  std::vector<at::Tensor> found;
  std::set<const void*> seen;
  for (const auto& tensor : net->parameters())
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) found.push_back(tensor);
  return found;
}

Tensors state(muster::ExportedModule& net) {
  Tensors found;
  for (const auto& [name, tensor] : muster::state_dict(net).tensors) found.insert(name, tensor.detach().clone());
  return found;
}

struct Run {
  IValue arguments, named;
};

/// One step for each run: outputs, the inputs as they are afterwards, gradients and buffers.
IValue trained(muster::ExportedModule net, const std::vector<Run>& runs, std::int64_t seed) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  c10::impl::GenericList found(c10::AnyType::get());
  for (const auto& run : runs) {
    const auto arguments = run.arguments.deepcopy(), named = run.named.deepcopy();
    net->zero_grad();
    const auto outputs = call(net, arguments, named);
    auto record = values();
    record.insert("outputs", copy(outputs));
    record.insert("arguments", copy(arguments));
    backward(outputs);
    Tensors gradients, buffers;
    for (const auto& item : net->named_parameters())
      if (item.value().grad().defined()) gradients.insert(item.key(), item.value().grad().resolve_conj().clone());
    for (const auto& item : net->named_buffers()) buffers.insert(item.key(), item.value().clone());
    record.insert("gradients", gradients);
    record.insert("buffers", buffers);
    found.push_back(record);
  }
  return found;
}

IValue evaluated(muster::ExportedModule net, const std::vector<Run>& runs, std::int64_t seed) {
  net->eval();
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  const at::NoGradGuard no_grad;
  c10::impl::GenericList found(c10::AnyType::get());
  for (const auto& run : runs) found.push_back(copy(call(net, run.arguments.deepcopy(), run.named.deepcopy())));
  net->train();  // a step in between is as if there had been no evaluation
  return found;
}

IValue optimised(muster::ExportedModule net, torch::optim::Optimizer& optimizer, const std::vector<Run>& runs,
                 std::int64_t seed, std::int64_t steps) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto& run = runs[static_cast<std::size_t>(step) % runs.size()];
    optimizer.zero_grad();
    backward(call(net, run.arguments.deepcopy(), run.named.deepcopy()));
    optimizer.step();
  }
  return state(net);
}

IValue computed(const std::string& file, const Values& task) {
  const auto seed = task.at("seed").toInt(), steps = task.at("steps").toInt();
  const auto rate = task.at("learning_rate").toDouble();
  std::vector<Run> runs;
  for (const auto& run : task.at("runs").toListRef()) {
    const auto& parts = run.toTupleRef().elements();
    runs.push_back({parts[0], parts[1]});
  }
  const auto load = [&] { return muster::load_exported(file); };
  auto found = values();
  {
    auto net = load();
    c10::List<std::string> names;
    for (const auto& name : net->input_names()) names.push_back(name);
    found.insert("inputs", names);
    found.insert("train", trained(net, runs, seed));
    if (task.at("evaluates").toBool()) found.insert("eval", evaluated(net, runs, seed));
    found.insert("state", state(net));
  }
  if (steps > 0) {
    auto net = load();
    torch::optim::SGD sgd(parameters(net), torch::optim::SGDOptions(rate).momentum(0.9).weight_decay(0.01));
    found.insert("SGD", optimised(net, sgd, runs, seed, steps));
    net = load();
    torch::optim::Adam adam(parameters(net), torch::optim::AdamOptions(rate));
    found.insert("Adam", optimised(net, adam, runs, seed, steps));
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  const std::string folder = argv[1];
  for (int i = 2; i < argc; ++i) {
    const auto path = folder + "/" + argv[i];
    auto found = values();
    try {
      found.insert("found", computed(path + ".pt2", read(path + ".in").toGenericDict()));
    } catch (const muster::Error& error) {
      found.insert("refused", std::string(error.what()));
    } catch (const std::exception& error) {
      found.insert("thrown", std::string(error.what()));
    }
    write(path + ".out", found);
  }
}
