// Models of TorchScript: loaded, trained as any other, saved for Python.
#include "muster/script.hpp"

#include "base/file.hpp"
#include "muster/error.hpp"
#include "support/job.hpp"

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::script_test {
namespace {

namespace fs = std::filesystem;
namespace jit = torch::jit;
using detail::read_file;
using detail::write_file;
using test::run;
using test::world;

at::Tensor values(at::IntArrayRef sizes, double seed) {
  return at::sin(at::arange(at::empty(sizes).numel(), at::kDouble) * 1.7 + seed * 3.1).to(at::kFloat).view(sizes) / 2;
}

/// As torch.jit.script makes them of Python's classes.
jit::Module scripted() {
  jit::Module norm("__torch__.Norm");
  norm.register_parameter("weight", at::ones({8}).requires_grad_(), false);
  norm.register_parameter("bias", at::zeros({8}).requires_grad_(), false);
  norm.register_buffer("running_mean", at::zeros({8}));
  norm.register_buffer("running_var", at::ones({8}));
  norm.register_attribute("training", c10::BoolType::get(), true);
  norm.define(R"(
def forward(self, x: Tensor) -> Tensor:
    return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
                            self.training, 0.1, 1e-05, False)

def mode(self) -> bool:
    return self.training
)");
  jit::Module net("__torch__.Net");
  net.register_parameter("w1", values({8, 1}, 1).requires_grad_(), false);
  net.register_parameter("b1", values({8}, 2).requires_grad_(), false);
  net.register_parameter("w2", values({1, 8}, 3).requires_grad_(), false);
  net.register_parameter("frozen", at::ones({1}), false);
  net.register_buffer("seen", at::zeros({}, at::kLong));
  net.register_attribute("training", c10::BoolType::get(), true);
  net.register_module("norm", norm);
  net.define(R"(
def forward(self, x: Tensor) -> Tensor:
    if self.training:
        self.seen = self.seen + x.size(0)
    return torch.linear(torch.relu(self.norm.forward(torch.linear(x, self.w1, self.b1))), self.w2) * self.frozen

def both(self, x: Tensor, factor: float) -> Tuple[Tensor, Tensor]:
    return x * factor, x + factor

def modes(self) -> Tuple[bool, bool]:
    return self.training, self.norm.mode()

def counted(self) -> Tensor:
    return self.seen

def count_in_place(self):
    self.seen.add_(1)
)");
  return net;
}

fs::path file_of_scripted(const fs::path& folder) {
  const auto file = folder / ("net" + std::to_string(world().rank()) + ".pt");
  scripted().save(file.string());
  return file;
}

/// The same as a module of C++.
struct TwinImpl : torch::nn::Module {
  TwinImpl() {
    const auto script = scripted();
    for (const auto& [name, tensor] : script.named_parameters(false))
      p[name] = register_parameter(name, tensor, tensor.requires_grad());
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::linear(torch::relu(norm->forward(torch::linear(x, p["w1"], p["b1"]))), p["w2"]) * p["frozen"];
  }
  std::map<std::string, at::Tensor> p;
  torch::nn::BatchNorm1d norm = nullptr;
};
TORCH_MODULE(Twin);

void expect_same(const at::Tensor& have, const at::Tensor& want, const std::string& what) {
  EXPECT_TRUE(at::allclose(have, want, 1e-5, 1e-6)) << what << ": have\n" << have << "\nwant\n" << want;
}

int job(const std::string& name, const std::function<void(Session&)>& loop, const fs::path& storage,
        std::optional<Result>* result = nullptr, const Config& config = Config::object()) {
  auto [code, ended] = run(
      {storage, {}, {.train_loop_config = config, .run_config = {.name = name}, .datasets = {{"train", test::line()}}}},
      [&](Session& session, const Config&) { loop(session); });
  if (result) *result = std::move(ended);
  return code;
}

template <class Model, class Optimizer>
void train(Session& session, Model& net, Optimizer& optimizer, std::int64_t epochs, bool accumulate = false) {
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : session.get_dataset_shard("train").iter_torch_batches({.batch_size = 4})) {
      optimizer.zero_grad();
      const auto loss = [&] { return torch::mse_loss(net->forward(batch["x"]), batch["y"]); };
      if (accumulate) {
        const auto scope = session.no_sync();
        loss().backward();
      }
      loss().backward();
      optimizer.step();
    }
}

TEST(Script, HasTheNamesOfPythonsStateDict) {
  auto net = load_script(file_of_scripted(test::shared_folder()));
  std::vector<std::string> parameters, buffers, trained;
  for (const auto& item : net->named_parameters()) {
    parameters.push_back(item.key());
    if (item.value().requires_grad()) trained.push_back(item.key());
  }
  for (const auto& item : net->named_buffers()) buffers.push_back(item.key());
  EXPECT_EQ(parameters, (std::vector<std::string>{"w1", "b1", "w2", "frozen", "norm.weight", "norm.bias"}));
  EXPECT_EQ(trained, (std::vector<std::string>{"w1", "b1", "w2", "norm.weight", "norm.bias"}));
  EXPECT_EQ(buffers, (std::vector<std::string>{"seen", "norm.running_mean", "norm.running_var"}));
  EXPECT_EQ(net->name(), "Net");
}

TEST(Script, IsTrainedAsAModuleOfCpp) {
  const auto folder = test::shared_folder();
  const auto file = file_of_scripted(folder);
  for (const auto fuse : {Fuse::never, Fuse::always})
    for (const bool accumulate : {false, true}) {
      const auto name = std::string(fuse == Fuse::always ? "fused" : "plain") + (accumulate ? "-accumulated" : "");
      const auto loop = [&](Session& session) {
        auto net = session.prepare_model(load_script(file));
        auto twin = session.prepare_model(Twin());
        auto of_net = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05), {.fuse = fuse});
        auto of_twin = session.prepare_optimizer(torch::optim::Adam(twin->parameters(), 0.05), {.fuse = fuse});
        EXPECT_EQ(of_net.fused(), of_twin.fused());
        train(session, net, of_net, 2, accumulate);
        train(session, twin, of_twin, 2, accumulate);
        const auto trained = twin->named_parameters();
        for (const auto& item : net->named_parameters()) expect_same(item.value(), trained[item.key()], item.key());
        EXPECT_FALSE(at::allclose(net->named_parameters()["w1"], values({8, 1}, 1)));

        const auto evaluation = session.evaluation(net);
        const auto twins_evaluation = session.evaluation(twin);
        const auto of_twins = twin->named_buffers();
        for (const std::string buffer : {"norm.running_mean", "norm.running_var"})
          expect_same(net->named_buffers()[buffer], of_twins[buffer], buffer);
        EXPECT_GT(net->named_buffers()["seen"].item<std::int64_t>(), 0);
        const auto x = values({5, 1}, 4);
        expect_same(net->forward(x), twin->forward(x), "outputs");
        EXPECT_EQ(net->call({}, "modes").toTuple()->elements()[1].toBool(), false);
      };
      EXPECT_EQ(job(name, loop, folder), 0) << name;
    }
}

TEST(Script, IsSavedForWhoLoadsIt) {
  const auto folder = test::shared_folder();
  const auto file = file_of_scripted(folder);
  const auto saved = folder / ("trained" + std::to_string(world().rank()) + ".pt");
  const auto loop = [&](Session& session) {
    auto net = session.prepare_model(load_script(file));
    auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.05), {.fuse = Fuse::always});
    train(session, net, optimizer, 1);
    const auto x = values({5, 1}, 4);
    const auto evaluation = session.evaluation(net);
    std::vector<std::uint64_t> progress;
    net->save(saved, {.progress = [&](std::uint64_t done, std::uint64_t) { progress.push_back(done); }});
    EXPECT_FALSE(progress.empty());

    auto there = jit::load(saved.string());  // as Python does
    EXPECT_FALSE(there.is_training());
    EXPECT_TRUE(at::equal(there.forward({x}).toTensor(), net->forward(x)));
    auto here = load_script(saved);
    EXPECT_FALSE(here->is_training());
    const auto buffers = net->named_buffers(), again = here->named_buffers();
    for (const auto& item : buffers) EXPECT_TRUE(at::equal(again[item.key()], item.value())) << item.key();
    EXPECT_TRUE(at::equal(here->forward(x), net->forward(x)));

    EXPECT_THROW(net->save(saved), Error);
    net->save(saved, {.replace = true});
    EXPECT_THROW(net->save(folder / "nowhere" / "net.pt"), Error);
  };
  EXPECT_EQ(job("saved", loop, folder), 0);
  world().barrier();
  for (const auto& entry : fs::directory_iterator(folder))
    EXPECT_EQ(entry.path().filename().string().find(".tmp."), std::string::npos) << entry.path();
}

TEST(Script, IsAnEntryOfAState) {
  const auto folder = test::shared_folder();
  const auto file = file_of_scripted(folder);
  const auto loop = [&](std::int64_t epochs) {
    return [&, epochs](Session& session) {
      auto net = session.prepare_model(load_script(file));
      auto optimizer = session.prepare_optimizer(torch::optim::Adam(net->parameters(), 0.05));
      auto state = session.state({{"model", net}, {"optimizer", optimizer}});
      state.restore();
      for ([[maybe_unused]] auto epoch : session.epochs(epochs)) {
        train(session, net, optimizer, 1);
        session.report({}, state);
      }
    };
  };
  std::optional<Result> whole, resumed;
  EXPECT_EQ(job("whole", loop(2), folder, &whole), 0);
  EXPECT_EQ(job("resumed", loop(1), folder), 0);
  EXPECT_EQ(job("resumed", loop(2), folder, &resumed, {{"epochs", 2}}), 0);
  ASSERT_TRUE(whole && whole->checkpoint && resumed && resumed->checkpoint);
  const auto want = whole->checkpoint->to_dict().tensors, have = resumed->checkpoint->to_dict().tensors;
  EXPECT_TRUE(want.contains("model/norm.running_var"));
  for (const auto& [name, tensor] : want) {
    if (world().size() > 1 && name.find("running") != std::string::npos) continue;  // each rank's own
    EXPECT_TRUE(have.contains(name) && at::equal(have.at(name), tensor)) << name;
  }
}

TEST(Script, ModesAreTheProgramsToo) {
  auto net = load_script(file_of_scripted(test::shared_folder()));
  const auto modes = [&] {
    const auto both = net->call({}, "modes").toTuple()->elements().vec();
    return std::pair(both[0].toBool(), both[1].toBool());
  };
  EXPECT_EQ(modes(), std::pair(true, true));
  net->eval();
  EXPECT_EQ(modes(), std::pair(false, false));
  net->train();
  net->named_children()["norm"]->eval();
  EXPECT_EQ(modes(), std::pair(true, false));
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(net->named_children()["norm"]->is_training());
}

TEST(Script, BuffersAreTheProgramsToo) {
  auto net = load_script(file_of_scripted(test::shared_folder()));
  const auto seen = net->named_buffers()["seen"];
  const auto counted = [&] { return net->call({}, "counted").toTensor().item<std::int64_t>(); };
  net->forward(values({5, 1}, 1));  // puts another tensor in its place
  EXPECT_EQ(seen.item<std::int64_t>(), 5);
  net->call({}, "count_in_place");
  EXPECT_EQ(seen.item<std::int64_t>(), 6);
  {
    const at::NoGradGuard no_grad;
    seen.fill_(100);
  }
  EXPECT_EQ(counted(), 100);
  net->forward(values({5, 1}, 1));
  EXPECT_EQ(counted(), 105);
  seen.set_data(at::full({}, 7, at::kLong));  // as to() does
  EXPECT_EQ(counted(), 7);
  net->to(at::kDouble);
  EXPECT_EQ(net->forward(values({5, 1}, 1).to(at::kDouble)).scalar_type(), at::kDouble);
  EXPECT_EQ(net->named_buffers()["norm.running_mean"].scalar_type(), at::kDouble);
}

TEST(Script, AReplacedBufferMayBeInTheGraphOfABackward) {
  jit::Module script("__torch__.Scale");
  script.register_parameter("w", values({3}, 1).requires_grad_(), false);
  script.register_buffer("scale", at::ones({3}));
  script.define(R"(
def forward(self, x: Tensor) -> Tensor:
    y = x * self.w * self.scale
    self.scale = self.scale + 1
    return y
)");
  ScriptModule net(std::make_shared<ScriptModuleImpl>(script));
  for (const double scale : {1.0, 2.0, 3.0}) {
    net->zero_grad();
    net->forward(at::ones({3})).sum().backward();
    EXPECT_TRUE(at::equal(net->parameters()[0].grad(), at::full({3}, scale)));
  }
  EXPECT_TRUE(at::equal(net->buffers()[0], at::full({3}, 4.0)));
}

TEST(Script, APartInTwoPlacesIsOne) {
  jit::Module part("__torch__.Part"), script("__torch__.Tied");
  part.register_buffer("count", at::zeros({}));
  part.define("def forward(self, x: Tensor) -> Tensor:\n    self.count = self.count + 1\n    return x + self.count\n");
  script.register_module("first", part);
  script.register_module("second", part);
  script.define("def forward(self, x: Tensor) -> Tensor:\n    return self.second.forward(self.first.forward(x))\n");
  ScriptModule net(std::make_shared<ScriptModuleImpl>(script));
  EXPECT_EQ(net->forward(at::zeros({})).item<float>(), 3);
  const auto buffers = net->named_buffers();
  EXPECT_TRUE(buffers["first.count"].is_same(buffers["second.count"]));
  EXPECT_EQ(buffers["first.count"].item<float>(), 2);
}

TEST(Script, GivesAnyValueByCall) {
  auto net = load_script(file_of_scripted(test::shared_folder()));
  const auto both = net->call({at::ones({2}), 3.0}, "both").toTuple()->elements().vec();
  EXPECT_TRUE(at::equal(both[0].toTensor(), at::full({2}, 3.0)));
  EXPECT_TRUE(at::equal(both[1].toTensor(), at::full({2}, 4.0)));

  jit::Module pair("__torch__.Pair");
  pair.define("def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:\n    return x, x\n");
  ScriptModule of_pair(std::make_shared<ScriptModuleImpl>(pair));
  try {
    of_pair->forward(at::ones({2}));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_NE(std::string(error.what()).find("Pair gives a Tuple"), std::string::npos) << error.what();
  }
}

TEST(Script, StandsInASequentialOfTorch) {
  auto script = load_script(file_of_scripted(test::shared_folder()));
  torch::nn::Sequential net(torch::nn::Linear(3, 1), script);
  net->forward(values({4, 3}, 1)).sum().backward();
  EXPECT_TRUE(script->named_parameters()["w2"].grad().defined());
  EXPECT_TRUE(net->named_parameters().contains("1.norm.weight"));
}

TEST(Script, WhatIsNoProgramIsRefused) {
  const auto folder = test::shared_folder() / std::to_string(world().rank());
  fs::create_directory(folder);
  const auto file = file_of_scripted(folder);
  const auto whole = read_file(file);
  const auto error_of = [&](const fs::path& path) -> std::string {
    try {
      load_script(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
      return error.what();
    }
    return "no error";
  };
  const auto expect = [&](const fs::path& path, const std::string& words) {
    EXPECT_NE(error_of(path).find(words), std::string::npos) << error_of(path);
  };
  expect(folder / "none.pt", "No such file");
  expect(folder, "Is a directory");
  write_file(folder / "it.pt", "weights");
  expect(folder / "it.pt", "not a torch archive");
  write_file(folder / "it.pt", std::string_view(whole).substr(0, whole.size() / 2));
  expect(folder / "it.pt", "not a torch archive");
  save_torch({.tensors = {{"w", at::ones({2})}}}, folder / "dict.pt");
  expect(folder / "dict.pt", "no program of TorchScript");

  auto damaged = whole;
  const auto w2 = values({1, 8}, 3);
  const std::string bytes(static_cast<const char*>(w2.const_data_ptr()), w2.nbytes());
  ASSERT_NE(damaged.find(bytes), std::string::npos);
  damaged[damaged.find(bytes)] ^= 1;
  write_file(folder / "it.pt", damaged);
  expect(folder / "it.pt", "checksum is wrong");

  // A program that was saved by a library with operators of its own.
  caffe2::serialize::PyTorchStreamReader reader(file.string());
  caffe2::serialize::PyTorchStreamWriter writer((folder / "it.pt").string());
  const std::string known = "torch.batch_norm", unknown = "ops.nowhere.norm";
  int changed = 0;
  for (const auto& name : reader.getAllRecords()) {
    const auto [data, size] = reader.getRecord(name);
    std::string record(static_cast<const char*>(data.get()), size);
    if (const auto at = record.find(known); name.ends_with(".py") && at != std::string::npos) {
      record.replace(at, known.size(), unknown);
      ++changed;
    }
    if (name != "version" && name != ".data/serialization_id") writer.writeRecord(name, record.data(), record.size());
  }
  writer.writeEndOfFile();
  ASSERT_EQ(changed, 1);
  expect(folder / "it.pt", "torch cannot load its program: ");
}

}  // namespace
}  // namespace muster::script_test
