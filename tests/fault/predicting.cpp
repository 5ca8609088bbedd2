// Predictions into a file, for the script beside it: y = x · factor for 1,000 rows of [64], ten batches.
//   predicting --output FILE --factor F
#include "muster/launch.hpp"
#include "muster/predictor.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <CLI/CLI.hpp>

#include <string>

int main(int argc, char** argv) {
  muster::Launch launch(argc, argv);
  std::string output;
  double factor = 1;
  launch.app().add_option("--output", output)->required();
  launch.app().add_option("--factor", factor);
  return launch.run([&] {
    const auto x = at::arange(64'000, at::kFloat).view({1000, 64});
    const muster::TorchPredictor predictor([&](muster::Batch& batch) { return batch["x"] * factor; });
    muster::BatchPredictor(predictor).predict(launch, muster::Dataset::from_tensors({{"x", x}}), output,
                                              {.batch_size = 100});
  });
}
