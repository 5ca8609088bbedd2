// Samples of different length in what all ranks do together: fitting preprocessors and predicting.
#include "muster/error.hpp"
#include "muster/muster.hpp"
#include "muster/predictor.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace muster::ragged_test {
namespace {

using test::world;

/// Five samples of the lengths 3, 0, 2, 4, 1, whose tokens are 0, 1, …; their labels are 7, 8, 7, 8, 7. Collective.
Dataset texts(const std::filesystem::path& folder) {
  const auto path = (folder / "texts.h5").string();
  if (world().rank() == 0) {
    test::H5File file(path);
    const auto write = [&](const std::string& name, const std::vector<std::int64_t>& values) {
      file.dataset(name, {values.size()}, H5T_STD_I64LE, H5T_NATIVE_INT64, values.data());
    };
    write("tokens", test::counting<std::int64_t>(10));
    write("offsets", {0, 3, 3, 5, 9, 10});
    write("label", {7, 8, 7, 8, 7});
  }
  world().barrier();
  return Dataset::ragged(path, {.values = {"tokens"}, .columns = {"label"}, .padding = -1});
}

void expect_error(ExitCode code, const std::string& part, const std::function<void()>& work) {
  try {
    work();
    ADD_FAILURE() << "no error: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(Ragged, PreprocessorsAreFittedToTheOtherColumns) {
  const auto data = texts(test::shared_folder());
  expect_error(ExitCode::data, "its samples are of different length, and their padding would count",
               [&] { standard_scaler({"tokens"})->fit(data, world()); });
  const auto encoder = label_encoder("label");
  encoder->fit(data, world());
  const std::vector<std::int64_t> some{3, 0};
  const auto batch = data.transform(encoder).read(some);
  EXPECT_TRUE(at::equal(batch["label"], at::tensor({1, 0}, at::kLong)));
  EXPECT_TRUE(at::equal(batch["tokens"], at::tensor({5, 6, 7, 8, 0, 1, 2, -1}, at::kLong).view({2, 4})));
}

TEST(Ragged, PredictionsKeepColumnsOfOneShapeOnly) {
  const auto folder = test::shared_folder();
  const auto data = texts(folder);
  const auto output = folder / "sums.h5";
  std::vector<std::string> words{"predict", "--log-level", "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  const auto code = launch.run([&] {
    const BatchPredictor sums(
        TorchPredictor([](Batch& batch) { return (batch["tokens"] * batch["tokens_mask"]).sum(1); }));
    sums.predict(launch, data, output, {.batch_size = 2, .keep_columns = {"label"}});
    expect_error(ExitCode::usage, "the samples of \"tokens\" are of different length, and a column of a file has one",
                 [&] { sums.predict(launch, data, folder / "none.h5", {.keep_columns = {"tokens"}}); });
  });
  EXPECT_EQ(code, 0);
  const Dataset made(output);
  EXPECT_TRUE(at::equal(made.column("predictions"), at::tensor({3, 0, 7, 26, 9}, at::kLong)));
  EXPECT_TRUE(at::equal(made.column("label"), at::tensor({7, 8, 7, 8, 7}, at::kLong)));
}

}  // namespace
}  // namespace muster::ragged_test
