// Inference after training: on one rank, and by all of them into one file.
#include "muster/predictor.hpp"

#include "base/file.hpp"
#include "muster/muster.hpp"
#include "support/job.hpp"
#include "support/sick_writes.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace muster::predictor_test {
namespace {

using test::run;
using test::world;
namespace fs = std::filesystem;

/// With what evaluation mode is needed for.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(3, 2))};
  torch::nn::Dropout dropout{register_module("dropout", torch::nn::Dropout(0.5))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(2))};
  at::Tensor forward(const at::Tensor& x) { return norm(dropout(linear(x))); }
};
TORCH_MODULE(Net);

/// Rows of x [3], far from the mean 0, and labels 10, 20, 30.
std::vector<std::pair<std::string, at::Tensor>> table(std::int64_t rows) {
  const auto x = at::arange(3 * rows, at::kFloat).view({rows, 3}).remainder(17) + 100;
  return {{"x", x}, {"y", (at::arange(rows) % 3 + 1) * 10}};
}

/// The checkpoint of a short training, on all ranks.
Checkpoint trained(const std::string& name, PreprocessorPtr preprocessor, const fs::path& storage) {
  TorchTrainerOptions options{.run_config = {.name = name},
                              .datasets = {{"train", Dataset::from_tensors(table(24))}},
                              .preprocessor = std::move(preprocessor)};
  const auto [code, result] = run({storage, {}, options}, [](Session& session, const Config&) {
    Net net;
    session.prepare_model(net);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    auto state = session.state({{"model", net}, {"optimizer", optimizer}});
    for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 4})) {
      optimizer.zero_grad();
      net->forward(batch["x"]).square().mean().backward();
      optimizer.step();
    }
    session.report({{"a", 1}}, state);
  });
  EXPECT_EQ(code, 0);
  return *result->checkpoint;
}

/// What the net of that checkpoint makes of scaled rows, by hand.
at::Tensor by_hand(const Checkpoint& checkpoint, const at::Tensor& x) {
  Net net;
  checkpoint.load("model", net);
  net->eval();
  const torch::NoGradGuard no_grad;
  return net->forward(x);
}

/// All ranks under a launch.
int launched(const std::function<void(Launch&)>& body) {
  std::vector<std::string> words{"predict", "--log-level", "error"};
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  return launch.run([&] { body(launch); });
}

std::string error_of(ExitCode code, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

void expect_error(ExitCode code, const std::string& part, const std::function<void()>& work) {
  const auto text = error_of(code, work);
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

Batch columns(std::vector<Batch::Item> items) { return Batch(std::move(items)); }

Batch all_of(const Dataset& dataset) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(dataset.count()));
  std::iota(samples.begin(), samples.end(), 0);
  return dataset.read(samples);
}

TEST(Predictor, AppliesTheSavedPreprocessorAndTheSavedWeights) {
  const auto scaler = standard_scaler({"x"});
  const auto checkpoint = trained("run", chain({scaler, label_encoder("y")}), test::shared_folder());
  const auto rows = table(7);
  auto scaled = columns(rows);
  scaler->transform(scaled);

  Net net;
  net->dropout->eval();
  const auto predictor = TorchPredictor::from_checkpoint(checkpoint, net, {.feature_columns = {"x"}});
  const at::Tensor logits = predictor.predict(columns(rows));
  EXPECT_TRUE(at::equal(logits, by_hand(checkpoint, scaled["x"])));
  EXPECT_FALSE(logits.requires_grad());
  EXPECT_TRUE(net->is_training()) << "each module's mode is as before";
  EXPECT_FALSE(net->dropout->is_training());
  EXPECT_TRUE(at::equal(rows[0].second, table(7)[0].second)) << "the batch that was given stays";
  const at::Tensor without_label = predictor.predict(columns({rows[0]}));
  EXPECT_TRUE(at::equal(without_label, logits)) << "what was fitted on a label does not ask for it";

  const auto all = TorchPredictor::from_checkpoint(checkpoint, Net());
  expect_error(ExitCode::usage, "the batch has the columns x, y, but forward() takes one",
               [&] { all.predict(columns(rows)); });
  expect_error(ExitCode::data, "fitted on the column \"y\", but the data has x",
               [&] { all.predict(columns({rows[0]})); });
  expect_error(ExitCode::data, "no column \"x\"", [&] { predictor.predict(columns({rows[1]})); });
  EXPECT_NE(error_of(ExitCode::data, [&] { TorchPredictor::from_checkpoint(checkpoint, torch::nn::Linear(1, 1)); }),
            "no error")
      << "another model";
}

TEST(Predictor, AFunctionTakesAndGivesWhatItWants) {
  const auto checkpoint = trained("run", nullptr, test::shared_folder());
  Net net;
  const auto predictor = TorchPredictor::from_checkpoint(
      checkpoint, net,
      [net](Batch& batch) mutable {
        const auto logits = net->forward(batch["x"]);
        return std::map<std::string, at::Tensor>{{"logits", logits}, {"class", logits.argmax(1) + batch["y"]}};
      },
      {.dtypes = {{"y", at::kInt}}});
  const auto rows = table(5);
  const auto prediction = predictor.predict(columns(rows));
  const auto logits = by_hand(checkpoint, rows[0].second);
  EXPECT_TRUE(at::equal(prediction["logits"], logits));
  EXPECT_TRUE(at::equal(prediction["class"], logits.argmax(1) + rows[1].second));
  expect_error(ExitCode::usage, "it has the columns class, logits", [&] { at::Tensor one = prediction; });
  expect_error(ExitCode::usage, "it has no column \"x\"", [&] { static_cast<void>(prediction["x"]); });

  const TorchPredictor sums([](Batch& batch) { return batch["x"].sum(1); });
  const at::Tensor sum = sums.predict(columns(rows));
  EXPECT_TRUE(at::equal(sum, rows[0].second.sum(1)));
  const TorchPredictor one_row([](Batch& batch) { return batch["x"].sum(); });
  expect_error(ExitCode::data, "\"predictions\" has 0 rows for 5", [&] { one_row.predict(columns(rows)); });
  const TorchPredictor misspelt([](Batch& batch) { return batch["x"]; }, {.dtypes = {{"X", at::kHalf}}});
  expect_error(ExitCode::usage, "dtypes names \"X\", but the model is given x, y",
               [&] { misspelt.predict(columns(rows)); });
  const TorchPredictor on_gpu([](Batch& batch) { return batch["x"]; }, {.use_gpu = true});
  if (!torch::cuda::is_available()) expect_error(ExitCode::data, "no GPU", [&] { on_gpu.predict(columns(rows)); });
}

/// x less its smallest value.
struct Shift : Preprocessor {
  void fit(const Dataset& dataset, const Communicator& communicator) override {
    least = communicator.all_reduce(all_of(dataset)["x"].min().item<double>(), ReduceOp::min);
  }
  bool fitted() const override { return least.has_value(); }
  void transform(Batch& batch) const override { batch.set("x", batch["x"] - *least); }
  Json state() const override { return {{"least", *least}}; }
  void load_state(const Json& state) override { least = state.at("least").get<double>(); }
  std::optional<double> least;
};

struct ShiftOfAnotherVersion final : Shift {
  void load_state(const Json& state) override { least = state.at("smallest").get<double>(); }
};

TEST(Predictor, APreprocessorOfOnesOwnGetsItsState) {
  const auto checkpoint = trained("run", std::make_shared<Shift>(), test::shared_folder());
  const auto rows = table(5);
  const PredictorOptions features{.feature_columns = {"x"}};
  expect_error(ExitCode::usage, "it is of a class of your own",
               [&] { TorchPredictor::from_checkpoint(checkpoint, Net(), features); });
  auto options = features;
  options.preprocessor = std::make_shared<Shift>();
  const at::Tensor logits = TorchPredictor::from_checkpoint(checkpoint, Net(), options).predict(columns(rows));
  EXPECT_TRUE(at::equal(logits, by_hand(checkpoint, rows[0].second - 100)));
  options.preprocessor = std::make_shared<ShiftOfAnotherVersion>();
  expect_error(ExitCode::data, "smallest", [&] { TorchPredictor::from_checkpoint(checkpoint, Net(), options); });
  options.preprocessor = standard_scaler({"x"});
  expect_error(ExitCode::data, "preprocessor", [&] { TorchPredictor::from_checkpoint(checkpoint, Net(), options); });
  expect_error(ExitCode::usage, "making a predictor: there is no function. Give one",
               [] { TorchPredictor(TorchPredictor::Function()); });
  expect_error(ExitCode::usage, "the function returned no columns. Return some", [&] {
    TorchPredictor([](Batch&) { return std::map<std::string, at::Tensor>(); }).predict(columns(rows));
  });
  expect_error(ExitCode::usage, "the preprocessor is not fitted",
               [&] { TorchPredictor([](Batch& batch) { return batch["x"]; }, options); });
}

/// The same of a class that does not say whether it is fitted.
struct SilentShift : Preprocessor {
  void fit(const Dataset&, const Communicator&) override { least = 100; }
  void transform(Batch& batch) const override { batch.set("x", batch["x"] - least); }
  Json state() const override { return {{"least", least}}; }
  void load_state(const Json& state) override { least = state.at("least").get<double>(); }
  double least = 0;
};

TEST(Predictor, APreprocessorNeedNotSayThatItIsFitted) {
  const auto checkpoint = trained("run", std::make_shared<SilentShift>(), test::shared_folder());
  const auto rows = table(5);
  const PredictorOptions options{.feature_columns = {"x"}, .preprocessor = std::make_shared<SilentShift>()};
  const at::Tensor logits = TorchPredictor::from_checkpoint(checkpoint, Net(), options).predict(columns(rows));
  EXPECT_TRUE(at::equal(logits, by_hand(checkpoint, rows[0].second - 100)));
  const auto fitted = std::make_shared<SilentShift>();
  fitted->least = 100;
  const TorchPredictor given([](Batch& batch) { return batch["x"]; }, {.preprocessor = fitted});
  EXPECT_TRUE(at::equal(given.predict(columns(rows))["predictions"], rows[0].second - 100));
}

/// Drops the first row.
struct Tail : SilentShift {
  void transform(Batch& batch) const override {
    for (const auto& [name, tensor] : Batch(batch)) batch.set(name, tensor.slice(0, 1));
  }
};

TEST(Predictor, APreprocessorThatDropsRowsIsRefused) {
  const TorchPredictor predictor([](Batch& batch) { return at::zeros({batch["x"].size(0) + 1}); },
                                 {.preprocessor = std::make_shared<Tail>()});
  expect_error(ExitCode::data, "5 rows before it and 4 after it", [&] { predictor.predict(columns(table(5))); });
  const auto dropped = Dataset::from_tensors(table(9)).transform(std::make_shared<Tail>());
  const TorchPredictor all([](Batch& batch) { return batch["x"]; });
  const auto output = test::shared_folder() / "out.h5";
  EXPECT_EQ(launched([&](Launch& launch) { BatchPredictor(all).predict(launch, dropped, output); }), 65);
  EXPECT_FALSE(fs::exists(output));
}

/// The same, where the values are.
struct ShiftInPlace : Preprocessor {
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  void transform(Batch& batch) const override { batch["x"].sub_(100); }
  Json state() const override { return Json::object(); }
  void load_state(const Json&) override {}
};

TEST(Predictor, LeavesTheBatchAsItIs) {
  const auto batch = columns({{"x", at::full({3}, 101)}});
  const TorchPredictor doubled([](Batch& given) { return given["x"].mul_(2); });
  const TorchPredictor shifted([](Batch& given) { return given["x"].mul_(3); },
                               {.preprocessor = std::make_shared<ShiftInPlace>()});
  for (int i = 0; i < 2; ++i) {
    const at::Tensor twice = doubled.predict(batch), three = shifted.predict(batch);
    EXPECT_TRUE(at::equal(twice, at::full({3}, 202))) << i;
    EXPECT_TRUE(at::equal(three, at::full({3}, 3))) << i;
  }
  EXPECT_TRUE(at::equal(batch["x"], at::full({3}, 101)));
}

TEST(Predictor, ABatchThatIsLeftEmptyHasAPredictionToo) {
  const auto data = Dataset::from_tensors({{"x", at::arange(3 * world().size() - 1, at::kFloat).unsqueeze(1)}});
  const auto [code, result] =
      run({test::shared_folder(), {}, {.run_config = {.name = "run"}, .datasets = {{"train", data}}}},
          [](Session& session, const Config&) {
            const TorchPredictor predictor([](Batch& batch) { return batch["x"] * 2; });
            for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) {
              const at::Tensor doubled = predictor.predict(batch);
              EXPECT_TRUE(at::equal(doubled, batch["x"] * 2)) << batch.size();
            }
          });
  EXPECT_EQ(code, 0) << (result->error ? result->error->what() : "");
}

TEST(BatchPredictor, WritesARowForEachInTheirOrder) {
  const auto folder = test::shared_folder();
  const auto scaler = standard_scaler({"x"});
  const auto checkpoint = trained("run", chain({scaler, label_encoder("y")}), folder);
  const auto output = folder / "predictions.h5";
  // Uneven, fewer batches than ranks, fewer rows than ranks.
  for (const auto& [rows, batch_size] : std::vector<std::pair<std::int64_t, std::int64_t>>{{50, 4}, {9, 256}, {2, 1}}) {
    const auto data = table(rows);
    EXPECT_EQ(launched([&](Launch& launch) {
                const auto predictor = TorchPredictor::from_checkpoint(checkpoint, Net());
                BatchPredictor(predictor).predict(launch, Dataset::from_tensors(data), output,
                                                  {.batch_size = batch_size, .keep_columns = {"y"}});
              }),
              0);
    const Dataset written(output);
    EXPECT_EQ(written.schema(), (Schema{{"predictions", at::kFloat, {2}}, {"y", at::kLong, {}}}));
    const auto batch = all_of(written);
    EXPECT_TRUE(at::equal(batch["y"], data[1].second)) << "as it is stored";
    // The same batches as the ranks have computed.
    auto scaled = columns({data[0], {"y", at::full({rows}, 10)}});
    scaler->transform(scaled);
    std::vector<at::Tensor> expected;
    for (const auto& part : scaled["x"].split(batch_size)) expected.push_back(by_hand(checkpoint, part));
    EXPECT_TRUE(at::equal(batch["predictions"], at::cat(expected)));
    world().barrier();
  }
}

TEST(BatchPredictor, NeverReplacesWhatItReads) {
  const auto folder = test::shared_folder();
  const auto checkpoint = trained("run", nullptr, folder);
  const auto predict = [&](const Dataset& data, const fs::path& output) {
    return launched([&](Launch& launch) {
      BatchPredictor(TorchPredictor::from_checkpoint(checkpoint, Net())).predict(launch, data, output);
    });
  };
  const auto of_another = folder / "x.h5.tmp.1.0";  // which still writes
  if (world().rank() == 0) detail::write_file(of_another, "half");
  world().barrier();
  ASSERT_EQ(predict(Dataset::from_tensors({table(9)[0]}), folder / "x.h5"), 0);
  EXPECT_TRUE(fs::exists(of_another));
  if (world().rank() == 0) fs::create_symlink("x.h5", folder / "link.h5");
  world().barrier();
  const auto data = Dataset::from_hdf5({folder / "x.h5"}, {.columns = {"predictions"}});
  const auto predictor = TorchPredictor::from_checkpoint(checkpoint, Net());
  EXPECT_EQ(launched([&](Launch& launch) {
              const auto mapped = data.map_batches([](Batch&) {});
              for (const auto& each : {data, data.subset({0, 1}), mapped})
                expect_error(ExitCode::usage, "x.h5: it is a file of the dataset",
                             [&] { BatchPredictor(predictor).predict(launch, each, folder / "x.h5"); });
            }),
            0);
  EXPECT_EQ(predict(data, folder / "link.h5"), 64) << "a link is not replaced";
  EXPECT_EQ(predict(data, folder / "none" / "y.h5"), 64) << "there is no such folder";
  EXPECT_EQ(Dataset(folder / "x.h5").count(), 9);
}

TEST(BatchPredictor, KeepsTheTypesOfWhatTheModelGives) {
  const auto output = test::shared_folder() / "all.h5";
  const auto data = Dataset::from_tensors({{"i", at::arange(11)}});
  EXPECT_EQ(launched([&](Launch& launch) {
              const TorchPredictor predictor([](Batch& batch) {
                const auto& i = batch["i"];
                return std::map<std::string, at::Tensor>{
                    {"half", i.to(at::kHalf)},
                    {"even", (i % 2).eq(0)},
                    {"byte", i.to(at::kByte)},
                    {"image", i.view({-1, 1, 1}).expand({-1, 2, 3}).to(at::kDouble)},
                    {"none", i.unsqueeze(1).narrow(1, 0, 0)}};
              });
              BatchPredictor(predictor).predict(launch, data, output, {.batch_size = 3});
            }),
            0);
  const Dataset written = Dataset::from_hdf5({output.string()}, {.columns = {"half", "even", "byte", "image"}});
  const auto i = at::arange(11);
  const auto batch = all_of(written);
  EXPECT_TRUE(at::equal(batch["half"], i.to(at::kHalf)));
  EXPECT_TRUE(at::equal(batch["even"], (i % 2).eq(0)));
  EXPECT_TRUE(at::equal(batch["byte"], i.to(at::kByte)));
  EXPECT_TRUE(at::equal(batch["image"], i.view({-1, 1, 1}).expand({-1, 2, 3}).to(at::kDouble)));
}

TEST(BatchPredictor, ColumnsThatTheModelWritesToAreKeptAsTheyAre) {
  const auto output = test::shared_folder() / "out.h5";
  const auto x = at::arange(11, at::kFloat);
  EXPECT_EQ(launched([&](Launch& launch) {
              const TorchPredictor predictor(
                  [](Batch& batch) {
                    const auto doubled = batch["x"].mul_(2);
                    return std::map<std::string, at::Tensor>{{"doubled", doubled},
                                                             {"conjugate", at::complex(doubled, doubled).conj()},
                                                             {"negative", at::_neg_view(doubled)}};
                  },
                  {.feature_columns = {"x"}});
              BatchPredictor(predictor).predict(launch, Dataset::from_tensors({{"x", x}}), output,
                                                {.batch_size = 3, .keep_columns = {"x"}});
            }),
            0);
  const auto batch = all_of(Dataset::from_hdf5({output.string()}, {.columns = {"x", "doubled", "negative"}}));
  EXPECT_TRUE(at::equal(batch["x"], x));
  EXPECT_TRUE(at::equal(batch["doubled"], 2 * x));
  EXPECT_TRUE(at::equal(batch["negative"], -2 * x));
  const auto conjugate = all_of(Dataset::from_hdf5({output.string()}, {.columns = {"conjugate"}}))["conjugate"];
  EXPECT_TRUE(at::equal(conjugate, at::complex(2 * x, -2 * x)));
}

/// Whether anything but these files is in the folder.
bool holds_only(const fs::path& folder, const std::string& name) {
  return std::ranges::all_of(fs::directory_iterator(folder),
                             [&](const auto& entry) { return entry.path().filename() == name; });
}

TEST(BatchPredictor, AFailureOnOneRankIsThatOfAllAndLeavesWhatWasThere) {
  const auto folder = test::shared_folder();
  const auto output = folder / "out.h5";
  const auto data = Dataset::from_tensors({{"i", at::arange(40)}, {"j", at::arange(40)}});
  const auto last = world().size() - 1;
  std::string before;
  EXPECT_EQ(
      launched([&](Launch& launch) {
        const TorchPredictor ours([](Batch& batch) { return batch["i"]; }, {.feature_columns = {"i"}});
        const BatchPredictorOptions small{.batch_size = 2};
        BatchPredictor(ours).predict(launch, data, output, small);
        before = detail::read_file(output);
        const auto fails = [&](ExitCode code, const std::string& part, const TorchPredictor& predictor,
                               const BatchPredictorOptions& options) {
          expect_error(code, part, [&] { BatchPredictor(predictor).predict(launch, data, output, options); });
          EXPECT_EQ(detail::read_file(output), before) << part;
          EXPECT_TRUE(holds_only(folder, "out.h5")) << part;
          world().barrier();
        };
        int calls = 0;
        fails(ExitCode::user_error, "the last rank fails", TorchPredictor([&](Batch& batch) {
                if (world().rank() == last && ++calls == 3) throw std::runtime_error("the last rank fails");
                return batch["i"];
              }),
              small);
        if (last > 0)
          fails(ExitCode::data,
                "the columns are predictions Long[] on rank 0 and predictions Float[] on rank " + std::to_string(last),
                TorchPredictor(
                    [&](Batch& batch) { return world().rank() == last ? batch["i"].to(at::kFloat) : batch["i"]; }),
                small);
        calls = 0;
        fails(ExitCode::data, "for an earlier batch it gave predictions Long[]",
              TorchPredictor([&](Batch& batch) { return ++calls == 2 ? batch["i"].unsqueeze(1) : batch["i"]; }), small);
        fails(ExitCode::usage, "batch_size is less than 1", ours, {.batch_size = 0});
        fails(ExitCode::data, "no column \"z\"", ours, {.keep_columns = {"z"}});
        fails(ExitCode::usage, "the model gives a column \"j\" too", TorchPredictor([](Batch& batch) {
                return std::map<std::string, at::Tensor>{{"j", batch["i"]}};
              }),
              {.keep_columns = {"j"}});
        fails(ExitCode::usage, "a column is called \"head/j\"", TorchPredictor([](Batch& batch) {
                return std::map<std::string, at::Tensor>{{"head/j", batch["i"]}};
              }),
              small);
        fails(ExitCode::usage, "the name of a column is not UTF-8", TorchPredictor([](Batch& batch) {
                return std::map<std::string, at::Tensor>{{"\xff", batch["i"]}};
              }),
              small);
        fails(ExitCode::usage, "\"j\" is kept twice", ours, {.keep_columns = {"j", "j"}});
        fails(ExitCode::usage,
              "the model's \"predictions\" is not a dense tensor of plain values. Have it return to_dense",
              TorchPredictor([](Batch& batch) { return batch["i"].to_sparse(); }), small);
        // On the disk of one rank there is no room.
        std::optional<test::SickWrites> full;
        if (world().rank() == last) full.emplace("out.h5.tmp.", ENOSPC);
        fails(ExitCode::retry, "No space left on device", ours, small);
        full.reset();
        expect_error(ExitCode::usage, "there is no folder",
                     [&] { BatchPredictor(ours).predict(launch, data, folder / "nowhere" / "out.h5"); });
        BatchPredictor(ours).predict(launch, data, output, small);
        EXPECT_EQ(detail::read_file(output), before) << "the same predictions are the same bytes";
      }),
      0);
}

TEST(BatchPredictor, OptionsThatDifferBetweenRanksAreRefused) {
  if (world().size() == 1) return;
  const auto folder = test::shared_folder();
  const auto data = Dataset::from_tensors({{"i", at::arange(40)}, {"j", at::arange(40)}});
  const bool is_last = world().rank() + 1 == world().size();
  const auto refused = [&](Launch& launch, const std::string& option, const PredictorOptions& options,
                           const BatchPredictorOptions& batches) {
    const TorchPredictor predictor([](Batch& batch) { return batch.begin()->second; }, options);
    expect_error(ExitCode::usage, "comparing the options of a prediction on all ranks: " + option + " is ",
                 [&] { BatchPredictor(predictor).predict(launch, data, folder / "out.h5", batches); });
  };
  EXPECT_EQ(launched([&](Launch& launch) {
              const std::vector<std::string> names{is_last ? "i" : "j"};
              refused(launch, "batch_size", {}, {.batch_size = is_last ? 4 : 5});
              refused(launch, "keep_columns", {}, {.keep_columns = names});
              refused(launch, "feature_columns", {.feature_columns = names}, {});
              refused(launch, "dtypes", {.dtypes = is_last ? at::kFloat : at::kDouble}, {});
            }),
            0);
  EXPECT_TRUE(fs::is_empty(folder));
}

TEST(BatchPredictor, DataThatDifferAreRefused) {
  if (world().size() == 1) return;
  const auto folder = test::shared_folder();
  const auto data = Dataset::from_tensors({{"i", at::arange(40) + world().rank() / (world().size() - 1)}});
  EXPECT_EQ(launched([&](Launch& launch) {
              BatchPredictor(TorchPredictor([](Batch& batch) {
                return batch["i"];
              })).predict(launch, data, folder / "out.h5");
            }),
            static_cast<int>(ExitCode::data));
  EXPECT_TRUE(fs::is_empty(folder));
}

}  // namespace
}  // namespace muster::predictor_test
