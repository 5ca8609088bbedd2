// Programs of torch.export with other weights, and predictions by them. Python's own reading is tested with the
// example.
#include "muster/checkpoint.hpp"
#include "muster/exported.hpp"
#include "muster/predictor.hpp"
#include "support/errors.hpp"
#include "support/folder.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace muster::exported_save_test {
namespace {

namespace fs = std::filesystem;
using test::error_of;
using test::Folder;

/// The program of the example, exported in training mode: pictures [N, 28, 28] of bytes to [N, 10].
const fs::path program = fs::path(__FILE__).parent_path() / "../../apps/exported/data/cnn.pt2";

at::Tensor pictures() { return at::arange(3 * 28 * 28, at::kLong).remainder(251).to(at::kByte).view({3, 28, 28}); }

at::Tensor evaluated(ExportedModule net) {
  const at::NoGradGuard no_grad;
  net->eval();
  return net->forward(pictures());
}

/// The program with other weights than those in its file.
ExportedModule changed() {
  auto net = load_exported(program);
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.mul_(1.5).add_(0.01);
  return net;
}

TEST(SaveExported, WritesTheProgramWithOtherWeights) {
  const Folder folder;
  auto net = changed();
  net->forward(pictures());  // changes batch-norm's statistics
  const auto file = folder / "changed.pt2";
  save_exported(program, state_dict(net), file);
  EXPECT_FALSE(at::equal(evaluated(load_exported(program)), evaluated(net)));
  EXPECT_TRUE(at::equal(evaluated(load_exported(file)), evaluated(net)));
  // Once more, from the written one; tensors that are not contiguous become so.
  auto state = state_dict(net);
  auto& weight = state.tensors.at("fc.weight");
  weight = weight.detach().t().contiguous().t();
  save_exported(file, state, folder / "again.pt2");
  EXPECT_TRUE(at::equal(evaluated(load_exported(folder / "again.pt2")), evaluated(net)));
}

TEST(SaveExported, ListsTheWeightsThatDoNotFit) {
  const Folder folder;
  const auto file = folder / "out.pt2";
  auto state = state_dict(load_exported(program));
  const auto bias = state.tensors.at("fc.bias");
  state.tensors.erase("fc.bias");
  state.tensors["other"] = bias;
  state.tensors["fc.weight"] = at::zeros({10, 3});
  state.tensors["features.0.bias"] = at::zeros({8}, at::kDouble);
  const auto error = error_of([&] { save_exported(program, state, file); }, ExitCode::data);
  for (const auto* text :
       {"the weights do not fit ", "needs \"fc.bias\"", "has no \"other\"", "\"fc.weight\"", "\"features.0.bias\""})
    EXPECT_SAYS(error, text);
  EXPECT_FALSE(fs::exists(file));
}

TEST(SaveExported, RefusesOtherFilesAndKeepsWhatIsThere) {
  const Folder folder;
  const auto state = state_dict(load_exported(program));
  save_torch(state, folder / "weights.pt");
  const auto file = folder / "out.pt2";
  EXPECT_SAYS(error_of([&] { save_exported(folder / "weights.pt", state, file); }, ExitCode::data),
              "it is no program of torch.export, but weights or other objects of torch.save()");
  EXPECT_SAYS(error_of([&] { load_torch(program); }, ExitCode::data), "it is a program of torch.export");
  save_exported(program, state, file);
  EXPECT_SAYS(error_of([&] { save_exported(program, state, file); }, ExitCode::usage), "there already");
  save_exported(program, state, file, {.replace = true});
}

TEST(SaveExported, AProgramPredictsWithTheWeightsOfACheckpoint) {
  auto net = changed();
  const auto checkpoint = Checkpoint::from_dict({{"model", net}});
  const auto predictor = TorchPredictor::from_checkpoint(checkpoint, load_exported(program));
  const at::Tensor predicted = predictor.predict(Batch({{"x", pictures()}}));
  EXPECT_TRUE(at::equal(predicted, evaluated(net)));
}

}  // namespace
}  // namespace muster::exported_save_test
