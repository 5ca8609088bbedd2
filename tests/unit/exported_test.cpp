// Programs of torch.export: run, trained, switched between modes, and refused. exported/make_files.py has the models.
#include "muster/exported.hpp"

#include "gradients/sync_batch_norm.hpp"
#include "support/errors.hpp"
#include "support/exported_file.hpp"
#include "support/folder.hpp"
#include "weights/exported/interpreter.hpp"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/sgd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::exported_test {
namespace {

namespace exported = detail::weights::exported;
using nlohmann::json;
using test::error_of;
using test::Folder;

/// Replaces the text in a program, by another of the same length, and switches its checksums off as torch can.
std::string edited(std::string bytes, const std::string& from, const std::string& to) {
  EXPECT_EQ(from.size(), to.size());
  const auto at = bytes.find(from);
  if (at == std::string::npos) throw std::runtime_error("there is no " + from);
  bytes.replace(at, to.size(), to);
  for (auto entry = bytes.find("PK\1\2"); entry != std::string::npos; entry = bytes.find("PK\1\2", entry + 4))
    std::memset(bytes.data() + entry + 16, 0, 4);
  return bytes;
}

/// The program with other records, and right checksums.
std::string rewritten(const std::string& name,
                      const std::function<void(std::string& path, std::string& record)>& change) {
  std::istringstream from(test::exported_program(name));
  std::string bytes;
  caffe2::serialize::PyTorchStreamReader reader(&from);
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  for (auto path : reader.getAllRecords()) {
    if (path.starts_with(".data/") || path == "version") continue;
    const auto [data, size] = reader.getRecord(path);
    std::string content(static_cast<const char*>(data.get()), size);
    change(path, content);
    writer.writeRecord(path, content.data(), content.size());
  }
  writer.writeEndOfFile();
  return bytes;
}

using Change = std::function<void(std::string& record)>;

/// The program with another record.
std::string changed(const std::string& name, const std::string& record, const Change& change) {
  return rewritten(name, [&](const std::string& path, std::string& content) {
    if (path == record) change(content);
  });
}

const char *const graph_record = "models/model.json", *const weights_record = "data/weights/model_weights_config.json";

/// A change of JSON: {PLACE: VALUE}. Places of the graph record that begin without a slash are in the graph.
Change json_change(const std::string& changes) {
  return [changes](std::string& record) {
    auto document = json::parse(record);
    const auto places = json::parse(changes);
    for (const auto& [place, value] : places.items())
      document[json::json_pointer((place.starts_with('/') ? "" : "/graph_module/graph/") + place)] = value;
    record = document.dump();
  };
}

class ExportedTest : public ::testing::Test {
 protected:
  ExportedModule load(const std::string& name, const ExportedOptions& options = {}) {
    return load_bytes(test::exported_program(name), options);
  }
  ExportedModule load_bytes(const std::string& bytes, const ExportedOptions& options = {}) {
    test::write_bytes(folder_ / "net.pt2", bytes);
    return load_exported(folder_ / "net.pt2", options);
  }
  std::string refusal(const std::string& bytes) {
    return error_of([&] { load_bytes(bytes); }, ExitCode::data);
  }

  Folder folder_;
};

at::Tensor numbers(std::int64_t rows) { return at::linspace(-1, 1, rows * 4).reshape({rows, 4}); }

std::vector<std::string> names(const auto& tensors) {
  std::vector<std::string> found;
  for (const auto& tensor : tensors) found.push_back(tensor.key());
  return found;
}

/// What the model of modes.pt2 computes in training, in C++.
at::Tensor modes_by_hand(ExportedModule& net, const at::Tensor& x) {
  auto parameters = net->named_parameters();
  auto buffers = net->named_buffers();
  auto mean = x.mean();
  auto h = at::linear(x, parameters["first.0.weight"], parameters["first.0.bias"]);
  buffers["first.1.num_batches_tracked"] += 1;
  h = at::batch_norm(h, parameters["first.1.weight"], parameters["first.1.bias"], buffers["first.1.running_mean"],
                     buffers["first.1.running_var"], true, 0.1, 1e-5, false);
  h = at::dropout(at::dropout(h, 0.5, true) * at::full({4}, 2.0), 0.25, true);
  // One statement each: the order of the nodes is that in which gradients are added.
  const auto turned = h.t();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto y = at::matmul(h, turned);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const auto last = at::linear(h, parameters["last.weight"], parameters["last.bias"]) + mean;
  return last + y.to(at::kFloat).sum();
}

TEST_F(ExportedTest, NamesAreThoseOfPython) {
  auto net = load("modes");
  EXPECT_EQ(names(net->named_parameters()),
            (std::vector<std::string>{"first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias", "last.weight",
                                      "last.bias"}));
  EXPECT_EQ(names(net->named_buffers()),
            (std::vector<std::string>{"first.1.running_mean", "first.1.running_var", "first.1.num_batches_tracked"}));
  EXPECT_EQ(net->input_names(), std::vector<std::string>{"x"});
  auto parameters = net->named_parameters();
  EXPECT_TRUE(parameters["first.0.weight"].is_same(parameters["last.weight"]));
  EXPECT_TRUE(net->is_training());
}

TEST_F(ExportedTest, TrainingEqualsTheSameModelInBits) {
  auto net = load("modes"), twin = load("modes");
  torch::optim::SGD optimizer(net->parameters(), 1e-6), twin_optimizer(twin->parameters(), 1e-6);
  for (int step = 0; step < 3; ++step) {
    const auto x = numbers(3 + step);
    const auto train = [&](auto& model, auto& optimiser, const auto& forward) {
      at::manual_seed(static_cast<std::uint64_t>(step));
      optimiser.zero_grad();
      forward(model, x).square().mean().backward();
      optimiser.step();
    };
    train(net, optimizer, [](auto& model, const auto& input) { return model->forward(input); });
    train(twin, twin_optimizer, modes_by_hand);
  }
  for (const auto& tensor : net->named_parameters())
    EXPECT_TRUE(tensor.value().equal(twin->named_parameters()[tensor.key()])) << tensor.key();
  for (const auto& tensor : net->named_buffers())
    EXPECT_TRUE(tensor.value().equal(twin->named_buffers()[tensor.key()])) << tensor.key();
}

TEST_F(ExportedTest, EvaluationEqualsAProgramExportedInEvaluation) {
  auto net = load("modes"), reference = load("modes_eval");
  EXPECT_FALSE(reference->is_training());
  net->eval();
  EXPECT_TRUE(net->forward(numbers(5)).equal(reference->forward(numbers(5))));
  EXPECT_EQ(net->named_buffers()["first.1.num_batches_tracked"].item<int>(), 0);
  net->train();
  EXPECT_FALSE(net->forward(numbers(5)).equal(reference->forward(numbers(5))));
  EXPECT_SAYS(error_of([&] { reference->train(); }, ExitCode::usage), "Export model.train()");
  EXPECT_FALSE(reference->is_training());
}

TEST_F(ExportedTest, RandomOperatorsNeedLeaveInEvaluation) {
  EXPECT_SAYS(error_of([&] { load("random")->eval(); }, ExitCode::usage), "aten.bernoulli.default in make_files.py:");
  EXPECT_SAYS(error_of([&] { load("random")->eval(); }, ExitCode::usage),
              " may be for training only, and evaluation cannot leave it out");
  auto net = load("random", {.keep_random = true});
  net->eval();
  EXPECT_TRUE(net->forward(at::ones({3, 4})).equal(at::full({3, 4}, 2.0)));
}

TEST_F(ExportedTest, TakesAndGivesTreesOfValues) {
  auto net = load("signature");
  EXPECT_EQ(net->input_names(), (std::vector<std::string>{"pair_0", "pair_1", "table_k", "bias"}));
  const auto x = numbers(5);
  c10::impl::GenericDict table(c10::StringType::get(), c10::TensorType::get());
  table.insert("k", x);
  const auto pair = c10::ivalue::Tuple::create({x, x * 3});
  const auto output = net->call({pair, table}, {{"bias", x + 1}}).toGenericDict();
  EXPECT_TRUE(output.at("sum").toTensor().equal(x + x * 3 + x * (x + 1)));
  const auto& more = output.at("more").toTupleRef().elements();
  EXPECT_EQ(more[0].toTensor().sizes(), (std::vector<std::int64_t>{3, 14}));
  const auto list = more[1].toListRef();
  EXPECT_TRUE(list[0].toTensor().equal(x * 2));
  EXPECT_EQ(list[1].toDouble(), 2.5);

  const auto call = [&](std::vector<c10::IValue> inputs, std::map<std::string, c10::IValue> named) {
    return error_of([&] { net->call(std::move(inputs), std::move(named)); }, ExitCode::usage);
  };
  EXPECT_SAYS(call({pair, table}, {}), "the input bias is missing. Give all inputs of the model");
  EXPECT_SAYS(call({pair, table}, {{"bias", x}, {"other", x}}), "the model takes others");
  EXPECT_SAYS(call({x, table}, {{"bias", x}}), "the input pair is not the tuple");
  EXPECT_SAYS(call({pair, table}, {{"bias", x}, {"flag", x}}), ", and the program was exported with None");
  EXPECT_SAYS(call({pair, table}, {{"bias", 3}}), "the input bias is a Int and no tensor");
  EXPECT_SAYS(call({pair, table}, {{"bias", x}, {"table", table}}), "it has two values for the input table");
  EXPECT_SAYS(call({pair, table}, {{"bias", numbers(4)}}),
              "dimension 0 of the input bias is 4, and the program was exported for that of dimension 0 of the input "
              "pair_0, 5");
  EXPECT_SAYS(error_of([&] { net->forward(x); }, ExitCode::usage), "the input pair is not the tuple");
}

TEST_F(ExportedTest, RefusesShapesThatWereNotExported) {
  auto net = load("modes");
  const auto run = [&](const at::Tensor& x) { return error_of([&] { net->forward(x); }, ExitCode::usage); };
  EXPECT_SAYS(run(numbers(1)), "dimension 0 of the input x is 1, and the program was exported for at least 2");
  EXPECT_SAYS(run(numbers(65)), "at most 64. Give another shape, or export the model with dynamic_shapes");
  EXPECT_SAYS(run(at::zeros({3, 5})), "dimension 1 of the input x is 5, and the program was exported for 4");
  EXPECT_SAYS(run(at::zeros({3, 4, 1})), "the input x has 3 dimensions, and the program was exported for 2");
  EXPECT_SAYS(run(at::zeros({3, 4}, at::kLong)), "is of type Long");
}

TEST_F(ExportedTest, SizesMayDependOnData) {
  const auto x = numbers(3);
  EXPECT_TRUE(load("depends")->forward(x).equal(x.masked_select(x > 0) * 2));
}

TEST_F(ExportedTest, WritesChangedBuffersBack) {
  auto net = load("counter");
  const auto x = numbers(3);
  net->forward(x);
  EXPECT_TRUE(net->forward(x).equal(x * x.sum(0) * 2));
  EXPECT_TRUE(net->named_buffers()["total"].equal(x.sum(0) * 2));
}

TEST_F(ExportedTest, MovesAllItsTensors) {
  auto net = load("modes");
  net->to(at::kDouble);
  net->eval();
  EXPECT_EQ(net->forward(numbers(3).to(at::kDouble)).scalar_type(), at::kDouble);
}

TEST_F(ExportedTest, ErrorsOfOperatorsNameTheLine) {
  auto net = load("modes");
  net->named_parameters()["last.bias"].set_data(at::zeros({5}));
  try {
    net->forward(numbers(3));
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_SAYS(std::string(error.what()), "in aten.linear.default of last, make_files.py:");
  }
}

TEST_F(ExportedTest, RunsTheNodesOfASubmodule) {
  test::write_bytes(folder_ / "net.pt2", test::exported_program("modes"));
  const auto program = exported::read_program(folder_ / "net.pt2", {});
  const auto is_inside = [](const exported::Node& node) { return node.module.starts_with("first."); };
  const auto begin = std::ranges::find_if(program.nodes, is_inside),
             end = std::find_if_not(begin, program.nodes.end(), is_inside);
  ASSERT_GT(end - begin, 1);
  std::vector<c10::IValue> values(program.slot_count);
  at::Tensor weight, bias;
  for (const auto& tensor : program.tensors) {
    values[tensor.slot] = tensor.value;
    if (tensor.name == "first.0.weight") weight = tensor.value;
    if (tensor.name == "first.0.bias") bias = tensor.value;
  }
  values[program.inputs[0].slot] = numbers(3);
  exported::run(program, static_cast<std::size_t>(begin - program.nodes.begin()),
                static_cast<std::size_t>(end - program.nodes.begin()), values, {.in_training = false});
  const auto expected = at::linear(numbers(3), weight, bias) / std::sqrt(1 + 1e-5);
  EXPECT_TRUE(values[std::prev(end)->outputs.at(0)].toTensor().allclose(expected));
}

TEST_F(ExportedTest, RefusesWhatItDoesNotRun) {
  EXPECT_SAYS(refusal(test::exported_program("branches")),
              "the program uses torch.ops.higher_order.cond in make_files.py:");
  const auto bytes = test::exported_program("depends");
  const auto refuse = [&](const std::string& from, const std::string& to) {
    return refusal(edited(bytes, "\"" + from + "\"", "\"" + to + "\""));
  };
  EXPECT_SAYS(refuse("torch.ops.aten.gt.Scalar", "torch.ops.atem.gt.Scalar"), ".namespaces = {\"atem\"}");
  EXPECT_SAYS(refuse("torch.ops.aten.gt.Scalar", "torch.ops.aten.gt.Scalat"), "which this libtorch does not have");
  EXPECT_SAYS(refuse("torch.ops.aten.gt.Scalar", "torch.ops.aten._to_cpu.a"), "does not have");
  EXPECT_SAYS(refuse("schema_version", "schema_versiom"), "damaged");
  EXPECT_SAYS(refuse("torch_version", "torch_versiom"), "it has a field torch_versiom: the file has version 8.");
  EXPECT_SAYS(refusal(edited(bytes, "\"major\": 8", "\"major\": 9")), "version 9.");
  EXPECT_SAYS(refuse("as_int", "as_foo"), "the program needs a constant of the kind as_foo, which muster does not run");
  EXPECT_SAYS(refusal("PK"), "not a torch archive");
}

TEST_F(ExportedTest, RefusesProgramsThatContradictThemselves) {
  const struct {
    const char *program, *changes, *fact;
  } cases[] = {
      {"modes", R"({"tensor_values/x/dtype": 99})", "it has a type with the unknown number 99"},
      {"depends", R"({"nodes/3/inputs/1/arg": {"as_memory_format": 9}})", "its program has an unknown memory format"},
      {"depends", R"({"nodes/3/inputs/1/arg": {"as_int": 1, "as_bool": true}})",
       "a value in it has several types, or none"},
      {"depends", R"({"nodes/3/outputs/-": {"as_sym_bool": {"as_name": "more"}}})",
       "_operator.ge does not give so many values"},
      {"depends", R"({"nodes/0/inputs/0/arg/as_tensor/name": "later"})", "it uses later before it is computed"},
      {"depends", R"({"nodes/1/outputs/0/as_tensor/name": "gt"})", "two values are called gt"},
      {"depends", R"({"outputs/0": {"as_ints": [1]}})", "an output is no value"},
      {"modes", R"({"nodes/0/inputs/1/arg": {"as_int": 1}})", "grad_enabled has no graph"},
      {"modes", R"({"nodes/0/inputs/-": {"arg": {"as_int": 1}}})", "grad_enabled has other inputs than its graph"},
      {"modes", R"({"nodes/0/outputs/-": {"as_none": true}})", "grad_enabled has other outputs"},
      {"modes", R"({"nodes/0/outputs/0/as_tensor/name": "x"})", "two values are called x"},
      {"modes",
       R"({"nodes/0/inputs/2": {"arg": {"as_tensor": {"name": "x"}}}, "nodes/0/inputs/3": {"arg": {"as_tensor": {"name": "x"}}},
           "nodes/0/inputs/1/arg/as_graph/graph/inputs": [{"as_tensor": {"name": "y"}}, {"as_tensor": {"name": "y"}}]})",
       "grad_enabled has two inputs of one name"},
      {"modes", R"({"nodes/7/inputs/0/arg": {"as_string": "abacus"}})", "its program is damaged: "},
      {"modes", R"({"nodes/11/inputs/1/arg": {"as_int": 5000}})", "whose argument dtype is not of its type ScalarType"},
      {"modes", R"({"nodes/11/inputs/1/arg": {"as_tensor": {"name": "x"}}})",
       "whose argument dtype is not of its type"},
      {"modes", R"({"nodes/4/inputs/1/arg": {"as_bool": true}})", "whose argument p is not of its type float"},
      {"modes", R"({"nodes/4/inputs/2/arg": {"as_string": "x"}})", "whose argument train is not of its type bool"},
      {"modes", R"({"nodes/9/inputs/1/arg": {"as_ints": [1, 2]}})", "whose argument other is not of its type Tensor"},
      {"modes", R"({"tensor_values/x/sizes/1/as_int": 1e300})", "a number is not an integer"},
      {"modes", R"({"/graph_module/signature/input_specs/0/parameter/parameter_name": "gone"})",
       "there is no gone in it"},
      {"modes", R"({"/graph_module/signature/input_specs/1/parameter/parameter_name": "first.0.weight"})",
       "already defined"},
      {"depends", R"({"/graph_module/signature/input_specs": []})", "its inputs are not those it lists"},
      {"depends", R"({"/graph_module/signature/output_specs": []})", "its outputs are not those it lists"},
      {"depends",
       R"({"/graph_module/signature/output_specs/0": {"buffer_mutation": {"arg": {"name": "mul"}, "buffer_name": "gone"}}})",
       "it changes a tensor that is not there"},
      {"depends", R"({"/graph_module/module_call_graph/0/signature/in_spec": "[2, null]"})",
       "its signature has another version"},
      {"depends",
       R"({"/graph_module/module_call_graph/0/signature/in_spec":
           "[1, {\"type\": \"builtins.dict\", \"context\": \"[1]\", \"children_spec\": []}]"})",
       "its signature has a dict without its keys"},
      {"depends",
       R"({"/graph_module/module_call_graph/0/signature/out_spec":
           "[1, {\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": []}]"})",
       "its outputs do not fit its tree"},
  };
  for (const auto& [program, changes, fact] : cases)
    EXPECT_SAYS(refusal(changed(program, graph_record, json_change(changes))), fact) << changes;
  const auto outside = json_change(R"({"/config/last.bias/tensor_meta/storage_offset/as_int": 99})");
  EXPECT_SAYS(refusal(changed("modes", weights_record, outside)),
              "its last.bias is larger than its bytes, or lies outside of them");
  EXPECT_SAYS(refusal(changed("modes", weights_record, json_change(R"({"/config/last.bias/tensor_meta/dtype": 12})"))),
              "its last.bias has values that are no bool");
  std::string deep = "a";
  for (int i = 0; i < 300; ++i) deep += ".a";
  EXPECT_SAYS(refusal(changed("modes", weights_record,
                              [&](std::string& record) {
                                auto document = json::parse(record);
                                document["config"][deep] = document["config"]["last.bias"];
                                record = document.dump();
                              })),
              "a name in it has too many parts");
  const auto with = [&](const char* record, const std::string& content) {
    return refusal(changed("depends", record, [&](std::string& old) { old = content; }));
  };
  EXPECT_SAYS(with("archive_format", "pt3"), "it is not of torch.export.save()");
  EXPECT_SAYS(with("archive_format", std::string(100, 'x')), "archive_format is absurdly large");
  EXPECT_SAYS(with("byteorder", "big"), "its byte order is not little-endian");
}

TEST_F(ExportedTest, RefusesUsesThatItsProgramDoesNotHave) {
  const json leaf = {{"type", nullptr}, {"context", nullptr}, {"children_spec", json::array()}},
             tuple = {1, {{"type", "builtins.tuple"}, {"context", "null"}, {"children_spec", {leaf}}}};
  const json changes = {{"/graph_module/module_call_graph/0/signature/out_spec", tuple.dump()}};
  auto net = load_bytes(changed("depends", graph_record, json_change(changes.dump())));
  EXPECT_SAYS(error_of([&] { net->forward(numbers(3)); }, ExitCode::usage), "it gives a Tuple");
  net = load_bytes(changed("signature", graph_record, json_change(R"({
    "inputs/4": {"as_sym_int": {"as_name": "flag"}}, "sym_int_values/flag": {"as_int": 3},
    "/graph_module/signature/input_specs/4": {"user_input": {}}})")));
  const auto x = numbers(3);
  const auto pair = c10::ivalue::Tuple::create({x, x});
  c10::impl::GenericDict table(c10::StringType::get(), c10::TensorType::get());
  table.insert("k", x);
  EXPECT_SAYS(error_of(
                  [&] {
                    net->call({pair, table}, {{"bias", x}, {"flag", 2.5}});
                  },
                  ExitCode::usage),
              "the input flag is no integer");
  net = load_bytes(changed("modes", graph_record,
                           json_change(R"({"nodes/3/target": "torch.ops.aten._batch_norm_impl_index.default"})")));
  auto first = load("modes");
  torch::nn::Sequential both(first, net);
  EXPECT_SAYS(error_of([&] { detail::gradients::replace_batch_norms(*both); }, ExitCode::usage),
              "the exported program has aten._batch_norm_impl_index.default, which cannot be synchronised");
  detail::gradients::BatchNormOperators& norms = *first;
  EXPECT_TRUE(norms.synchronised_operators().empty()) << "a refusal changes nothing";
  torch::nn::Sequential one(first);
  detail::gradients::replace_batch_norms(*one);
  EXPECT_FALSE(norms.synchronised_operators().empty());

  const auto state = state_dict(load("modes"));
  const auto save = [&](const std::string& program) {
    test::write_bytes(folder_ / "net.pt2", program);
    return error_of([&] { save_exported(folder_ / "net.pt2", state, folder_ / "other.pt2"); }, ExitCode::data);
  };
  EXPECT_SAYS(save(changed("modes", graph_record, json_change(R"({"/schema_version/major": 9})"))),
              "its format is another: the file has version 9.");
  EXPECT_SAYS(save(changed("modes", weights_record, json_change(R"({"/config/last.bias/use_pickle": true})"))),
              "its last.bias is pickled");
}

TEST_F(ExportedTest, ParametersThatTheGraphDoesNotTakeStayParameters) {
  auto net = load_bytes(changed("modes", weights_record, [](std::string& record) {
    auto document = json::parse(record);
    auto& spare = document["config"]["first.spare"] = document["config"]["last.bias"];
    spare["tensor_meta"]["requires_grad"] = false;
    record = document.dump();
  }));
  ASSERT_TRUE(net->named_parameters().contains("first.spare"));
  EXPECT_FALSE(net->named_parameters()["first.spare"].requires_grad());
  EXPECT_EQ(net->named_buffers().size(), 3U);
}

TEST_F(ExportedTest, ProgramsMayHaveAnyNameAndFolders) {
  test::write_bytes(folder_ / "named.pt2", rewritten("modes", [](std::string& path, std::string& record) {
                      if (path.ends_with(".json")) path.replace(path.rfind("model"), 5, "net");
                      if (path == "archive_version") path = "folder/", record = "";
                    }));
  auto net = load_exported(folder_ / "named.pt2");
  const at::NoGradGuard no_grad;
  net->named_parameters()["last.bias"].add_(1);
  save_exported(folder_ / "named.pt2", state_dict(net), folder_ / "saved.pt2");
  auto saved = load_exported(folder_ / "saved.pt2");
  net->eval();
  saved->eval();
  EXPECT_TRUE(saved->forward(numbers(3)).equal(net->forward(numbers(3))));
}

TEST_F(ExportedTest, SaysWhatAFileIs) {
  const auto refuse = [&](const std::string& name) {
    return error_of([&] { load_exported(folder_ / name); }, ExitCode::data);
  };
  save_torch(state_dict(load("modes")), folder_ / "weights.pt");
  test::write_bytes(folder_ / "empty.pt2", "");
  test::write_bytes(folder_ / "pickle.pt2", "\x80\x02}q\1.");
  EXPECT_SAYS(refuse("weights.pt"), "it is no program of torch.export, but weights or other objects of torch.save()");
  EXPECT_SAYS(refuse("empty.pt2"), "it has no bytes");
  EXPECT_SAYS(refuse("pickle.pt2"), "it is not a torch archive, or it is truncated");
  EXPECT_SAYS(refuse("none.pt2"), "No such file");
  EXPECT_SAYS(refuse("."), "directory");
  const auto renamed = [&](const std::string& name) {
    return refusal(rewritten("modes", [&](std::string& path, std::string&) {
      if (path == "archive_format") path = name;
    }));
  };
  EXPECT_SAYS(renamed("constants.pkl"), "but a module of TorchScript or C++");
  EXPECT_SAYS(renamed("other"), "but another archive");
}

TEST_F(ExportedTest, RefusesOperatorsThatReachMemory) {
  const auto is_allowed = [](const char* name, const char* overload) {
    return exported::is_allowed(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).schema());
  };
  EXPECT_TRUE(is_allowed("aten::linear", ""));
  EXPECT_TRUE(is_allowed("aten::_to_copy", ""));
  EXPECT_FALSE(is_allowed("aten::from_file", ""));
  EXPECT_FALSE(is_allowed("aten::set_", "source_Storage"));
  EXPECT_FALSE(is_allowed("aten::set_", "source_Tensor"));
  EXPECT_FALSE(is_allowed("aten::resize_", ""));
  EXPECT_FALSE(is_allowed("aten::_reshape_alias", ""));
  EXPECT_FALSE(is_allowed("aten::record_stream", ""));
  EXPECT_FALSE(is_allowed("aten::segment_reduce", ""));
  EXPECT_FALSE(is_allowed("aten::max_pool2d_with_indices_backward", ""));
  EXPECT_FALSE(is_allowed("aten::_scaled_dot_product_flash_attention_for_cpu", ""));
  EXPECT_TRUE(is_allowed("aten::__and__", "Tensor"));
}

TEST_F(ExportedTest, ChecksWhatOperatorsLeaveToTheirCallers) {
  const auto check = [](const char* name, const char* overload, const std::vector<c10::IValue>& arguments) {
    exported::find_check(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).schema())(arguments);
  };
  const auto x = at::ones({2, 3, 4}), three = at::ones({3}), one = at::ones({1}), indices = at::arange(3);
  check("aten::native_batch_norm", "", {x, three, c10::IValue(), three, three, false, 0.1, 1e-5});
  EXPECT_THROW(check("aten::native_batch_norm", "", {x, three, c10::IValue(), three, one, false, 0.1, 1e-5}),
               c10::Error);
  EXPECT_THROW(check("aten::_native_batch_norm_legit", "no_stats", {x, one, three, true, 0.1, 1e-5}), c10::Error);
  EXPECT_THROW(check("aten::_batch_norm_with_update", "", {x, one, three, three, three, 0.1, 1e-5}), c10::Error);
  check("aten::_weight_norm", "", {x, three, 1});
  EXPECT_THROW(check("aten::_weight_norm", "", {x, one, 1}), c10::Error);
  EXPECT_THROW(check("aten::_weight_norm", "", {x, three, 5}), c10::Error);
  check("aten::ctc_loss", "Tensor", {x, indices, indices, indices});
  EXPECT_THROW(check("aten::ctc_loss", "Tensor", {x, indices + 2, indices, indices}), c10::Error);
  EXPECT_THROW(check("aten::ctc_loss", "IntList", {x, indices - 1, indices, indices}), c10::Error);
}

TEST_F(ExportedTest, ComputesSizesLikePython) {
  const auto compute = [](const std::string& target, std::vector<c10::IValue> numbers) {
    return exported::find_arithmetic(target, numbers.size())(numbers);
  };
  EXPECT_EQ(compute("_operator.floordiv", {-7, 2}).toInt(), -4);
  EXPECT_EQ(compute("_operator.mod", {-7, 2}).toInt(), 1);
  EXPECT_EQ(compute("_operator.truediv", {7, 2}).toDouble(), 3.5);
  EXPECT_EQ(compute("_operator.pow", {3, 4}).toInt(), 81);
  EXPECT_EQ(compute("_operator.neg", {3}).toInt(), -3);
  EXPECT_EQ(compute("math.trunc", {-2.5}).toInt(), -2);
  EXPECT_EQ(compute("torch.sym_max", {3, 4}).toInt(), 4);
  EXPECT_EQ(compute("torch.sym_ite", {false, 3, 4}).toInt(), 4);
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const auto& [target, a, b] :
       std::vector<std::tuple<const char*, std::int64_t, std::int64_t>>{{"_operator.add", most, 1},
                                                                        {"_operator.mul", most, 2},
                                                                        {"_operator.floordiv", 1, 0},
                                                                        {"_operator.mod", 1, 0},
                                                                        {"_operator.pow", 10, 99},
                                                                        {"_operator.lshift", 1, 64},
                                                                        {"_operator.truediv", 1, 0}})
    EXPECT_THROW(compute(target, {a, b}), c10::Error) << target;
  EXPECT_EQ(exported::find_arithmetic("_operator.add", 1), nullptr);
  EXPECT_EQ(exported::find_arithmetic("os.system", 1), nullptr);
}

/// Without checksums, so that the damage reaches the program. What loads also runs, or throws. Each repetition
/// (--gtest_repeat) has other damage.
TEST_F(ExportedTest, DamageNeverCrashes) {
  static unsigned seed = 7;
  std::mt19937 random(seed++);
  const auto below = [&](std::size_t count) { return random() % count; };
  int loaded = 0;
  for (const auto& [name, count] : {std::pair<std::string, int>{"modes", 400}, {"signature", 1600}}) {
    const auto intact = edited(test::exported_program(name), "\"major\": 8", "\"major\": 8");
    const auto begin = intact.find("{\"graph_module\""), end = intact.rfind("\"torch_version\"");
    for (int i = 0; i < count; ++i) {
      auto bytes = intact;
      for (auto times = 1 + below(3); times > 0; --times) {
        const bool in_program = below(10) != 0;
        const auto at = in_program ? begin + below(end - begin) : below(bytes.size());
        bytes[at] = in_program ? "0123456789-.\"{}[]:,xst"[below(22)] : static_cast<char>(below(256));
      }
      if (below(20) == 0) bytes.resize(below(bytes.size()));
      try {
        auto net = load_bytes(bytes);
        ++loaded;
        const auto x = numbers(4);
        if (name == "modes")
          net->forward(x).sum().backward();
        else
          net->call({c10::ivalue::Tuple::create({x, x}), x}, {{"bias", x}});
      } catch (const std::exception&) {
      }
    }
  }
  EXPECT_GT(loaded, 100);
}

}  // namespace
}  // namespace muster::exported_test
