// Exported programs that several versions of torch have written, with what they compute in Python.
#include "muster/exported.hpp"

#include "support/errors.hpp"
#include "support/folder.hpp"

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace muster::exported_files_test {
namespace {

namespace fs = std::filesystem;

const fs::path folder = MUSTER_TEST_EXPORTED;  // tests/unit/exported/versions, with the script that made the files

class ExportedFiles : public testing::TestWithParam<const char*> {
 protected:
  fs::path program = folder / (std::string("torch-") + GetParam() + ".pt2");
  std::map<std::string, at::Tensor> python = load_torch(folder / (std::string("torch-") + GetParam() + ".pt")).tensors;
};

void expect_close(const at::Tensor& have, const at::Tensor& want, const std::string& what) {
  EXPECT_TRUE(at::allclose(have, want, 1e-5, 1e-6)) << what << ": have\n" << have << "\nwant\n" << want;
}

TEST_P(ExportedFiles, ComputeWhatTheyDoInPython) {
  auto net = load_exported(program);
  EXPECT_TRUE(net->is_training());
  EXPECT_EQ(net->input_names(), std::vector<std::string>{"x"});
  at::manual_seed(2);
  const auto training = net->forward(python.at("x"));
  expect_close(training, python.at("training"), "training");
  training.square().sum().backward();
  const auto parameters = net->named_parameters(), buffers = net->named_buffers();
  for (const auto& [name, tensor] : python) {
    if (name.starts_with("gradients.")) expect_close(parameters[name.substr(10)].grad(), tensor, name);
    if (name.starts_with("buffers.")) expect_close(buffers[name.substr(8)], tensor, name);
  }
  EXPECT_TRUE(parameters["decoder.weight"].is_same(parameters["encoder.weight"]));
  EXPECT_EQ(buffers["norm.num_batches_tracked"].item<std::int64_t>(), 1);

  net->eval();
  expect_close(net->forward(python.at("x")), python.at("evaluation"), "evaluation");
  EXPECT_EQ(buffers["norm.num_batches_tracked"].item<std::int64_t>(), 1);
}

TEST_P(ExportedFiles, TakeTheShapesOfTheExport) {
  auto net = load_exported(program);
  EXPECT_EQ(net->forward(at::ones({64, 2, 6})).size(0), 64 * 6);
  const std::vector<std::pair<at::Tensor, std::string>> wrong = {{at::ones({65, 2, 6}), "dimension 0 of the input x"},
                                                                 {at::ones({1, 2, 6}), "dimension 0 of the input x"},
                                                                 {at::ones({4, 2, 7}), "dimension 2 of the input x"},
                                                                 {at::ones({4, 2}), "the input x has 2 dimensions"},
                                                                 {at::ones({4, 2, 6}, at::kLong), "the input x"}};
  for (const auto& [x, words] : wrong)
    EXPECT_SAYS(test::error_of([&, &input = x] { net->forward(input); }, ExitCode::usage), words);
}

INSTANTIATE_TEST_SUITE_P(OfTorch, ExportedFiles, testing::Values("2.11", "2.12", "2.13"),
                         [](const auto& version) { return std::string("v2_") + (version.param + 2); });

/// The numbers differ in each repetition (--gtest_repeat) of the same program.
std::mt19937 dice() {
  static unsigned seed = 49;
  return std::mt19937(seed++);
}

std::size_t below(std::mt19937& dice, std::size_t count) { return static_cast<std::size_t>(dice()) % count; }

/// Loads and runs the file; true if it is refused. What torch's operators refuse is refused too.
bool is_refused(const fs::path& file, const at::Tensor& x) {
  try {
    auto net = load_exported(file);
    try {
      const auto y = net->forward(x);
      if (y.requires_grad()) y.sum().backward();
    } catch (const std::exception&) {
      return true;
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_NE(std::string(error.what()).find(file.string()), std::string::npos) << error.what();
    return true;
  }
  return false;
}

/// All values inside of a value of JSON, itself too.
void collect(nlohmann::json& value, std::vector<nlohmann::json*>& all) {
  all.push_back(&value);
  if (value.is_structured())
    for (auto& child : value) collect(child, all);
}

/// Replaces one value by another of the same file, by a number, or by nothing.
void damage(nlohmann::json& document, std::mt19937& random) {
  std::vector<nlohmann::json*> all;
  collect(document, all);
  auto& victim = *all[below(random, all.size())];
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max(),
                         numbers[] = {0,    1,        -1, 2, 3, 7, 100, std::int64_t{1} << 40, -(std::int64_t{1} << 40),
                                      most, -most - 1};
  switch (below(random, 4)) {
    case 0:
      victim = numbers[below(random, std::size(numbers))];
      break;
    case 1:
      victim = nullptr;
      break;
    case 2:
      if (victim.is_structured() && !victim.empty()) {
        victim.erase(std::next(victim.begin(), static_cast<std::ptrdiff_t>(below(random, victim.size()))));
        break;
      }
      [[fallthrough]];
    default:
      victim = nlohmann::json(*all[below(random, all.size())]);
  }
}

/// The checksums are right, but the graph or the list of its tensors says something else.
TEST(ExportedFile, WrongContentsAreRefusedOrRun) {
  const auto path = (folder / "torch-2.13.pt2").string();
  const test::Folder here;
  auto random = dice();
  caffe2::serialize::PyTorchStreamReader reader(path);
  std::map<std::string, std::string> records;
  std::map<std::string, nlohmann::json> documents;
  std::vector<std::string> texts;
  for (const auto& name : reader.getAllRecords()) {
    const auto [data, size] = reader.getRecord(name);
    records[name] = {static_cast<const char*>(data.get()), size};
    if (!name.ends_with(".json")) continue;
    documents[name] = nlohmann::json::parse(records[name]);
    texts.insert(texts.end(), name.ends_with("model.json") ? 8 : 1, name);  // the graph more often
  }
  std::size_t refused = 0;
  constexpr std::size_t count = 100;
  for (std::size_t i = 0; i < count; ++i) {
    const auto text = texts[below(random, texts.size())];
    auto document = documents[text];
    for (std::size_t changes = 1 + below(random, 2); changes > 0; --changes) damage(document, random);
    const auto file = here / (std::to_string(i) + ".pt2");
    {
      caffe2::serialize::PyTorchStreamWriter writer(file.string());
      for (const auto& [name, record] : records) {
        if (name == ".data/version" || name == ".data/serialization_id" || name == "version") continue;
        const auto contents = name == text ? document.dump() : record;
        writer.writeRecord(name, contents.data(), contents.size());
      }
      writer.writeEndOfFile();
    }
    refused += is_refused(file, at::ones({4, 2, 6}));
    fs::remove(file);
  }
  EXPECT_GT(refused, count / 10);  // names, and what is not read, may say anything
}

}  // namespace
}  // namespace muster::exported_files_test
