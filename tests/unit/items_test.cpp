// Datasets of items, and streams on a single worker.
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"
#include "support/errors.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace muster::items_test {
namespace {

using test::error_of;

Batch all_of(const Dataset& dataset) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(dataset.count()));
  std::iota(samples.begin(), samples.end(), 0);
  return dataset.read(samples);
}

std::string error_of(const Json& items) {
  return error_of([&] { Dataset::from_items(items); });
}

TEST(Items, AreColumnsByTheirKeys) {
  const auto items = Dataset::from_items({{{"x", 0}, {"y", 1}}, {{"x", 1}, {"y", 3}}, {{"x", 2}, {"y", 5.5}}});
  EXPECT_EQ(items.count(), 3);
  EXPECT_EQ(items.schema(), (Schema{{"x", at::kLong, {}}, {"y", at::kDouble, {}}})) << "one float makes floats";
  const auto batch = all_of(items);
  EXPECT_TRUE(at::equal(batch["x"], at::arange(3)));
  EXPECT_TRUE(at::equal(batch["y"], at::tensor({1.0, 3.0, 5.5}, at::kDouble)));
  EXPECT_EQ(at::unsqueeze(batch["x"], 1).sizes(), (std::vector<std::int64_t>{3, 1}));

  const auto one = Dataset::from_items({{{"x", 7}, {"y", 1}}});
  EXPECT_EQ(one.count(), 1) << "a list of one row";
  EXPECT_EQ(Dataset::from_items({{{"x", 1}}, {{"x", 2}}}).count(), 2) << "rows of one key";
}

TEST(Items, PlainValuesAreOneColumn) {
  EXPECT_TRUE(at::equal(all_of(Dataset::from_items({1, 2, 3}))["item"], at::tensor({1, 2, 3}, at::kLong)));
  EXPECT_EQ(Dataset::from_items({1}).count(), 1);
  EXPECT_TRUE(at::equal(all_of(Dataset::from_items({true, false}))["item"], at::tensor({1, 0}).to(at::kBool)));
  EXPECT_TRUE(
      at::equal(all_of(Dataset::from_items(std::vector<double>{0.5, 2}))["item"], at::tensor({0.5, 2.0}, at::kDouble)));
}

TEST(Items, ArraysHaveTheirShape) {
  const auto batch = all_of(Dataset::from_items({{{"a", {{1, 2, 3}, {4, 5, 6}}}}, {{"a", {{7, 8, 9}, {0, 0, 0}}}}}));
  EXPECT_TRUE(at::equal(batch["a"], at::tensor({1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0}, at::kLong).view({2, 2, 3})));
  EXPECT_EQ(all_of(Dataset::from_items({{1, 2}, {3, 4}}))["item"].sizes(), (std::vector<std::int64_t>{2, 2}));
}

TEST(Items, AnErrorNamesTheRowAndTheKey) {
  const auto holds = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  holds(error_of({{{"x", 0}}, {{"z", 1}}}), "row 1 has no \"x\", its keys are z");
  holds(error_of({{{"x", 0}}, {{"x", 1}, {"y", 2}}}), "row 1 has the keys x, y, and the first one has x");
  holds(error_of({{{"x", 0}}, 1}), "row 1 is no object");
  holds(error_of({1, {{"x", 0}}}), "row 1 is an object");
  holds(error_of({{{"x", 0}}, {{"x", "zero"}}}), "\"x\" of row 1 is string");
  holds(error_of({1, nullptr}), "\"item\" of row 1 is null");
  holds(error_of({{{"x", {1, 2}}}, {{"x", {1, 2, 3}}}}),
        "\"x\" of row 1 has the shape [3], in the first row it has [2]");
  holds(error_of({{{"x", {{1, 2}, {3, 4}}}}, {{"x", {{1, 2}, {3}}}}}), "\"x\" of row 1 is an array whose parts");
  holds(error_of({{{"x", {{1, 2}, 3}}}}), "\"x\" of row 0 is an array whose parts");
  holds(error_of({{{"x", {1, {2, 3}}}}}), "\"x\" of row 0 is an array whose parts");
  holds(error_of({{{"x", Json::array()}}}), "\"x\" of row 0 holds an empty array");
  holds(error_of({true, 1}), "\"item\" of row 1 holds numbers, but the values before it are booleans");
  holds(error_of({1, ~0ull}), "\"item\" of row 1 is larger than an int64 holds");
  holds(error_of(Json::array({Json::object()})), "row 0 has no keys");
  holds(error_of(Json::array()), "there are none");
  holds(error_of({{"x", 1}, {"y", 2}}), "one object and not a list");
}

MakeStream counting(std::int64_t rows) {
  return [rows](const StreamShard&) {
    return [rows, next = std::int64_t{0}]() mutable -> std::optional<Json> {
      if (next == rows) return {};
      return Json{{"i", next++}};
    };
  };
}

TEST(Stream, WhatNeedsACountOrAnIndexIsRefused) {
  const auto stream = Dataset::from_stream(counting(3));
  const auto refused = [&](const std::function<void()>& work, const std::string& doing) {
    const auto text = error_of(work, ExitCode::usage);
    EXPECT_NE(text.find(doing), std::string::npos) << text;
    EXPECT_NE(text.find("a stream gives its rows one after the other"), std::string::npos) << text;
  };
  refused([&] { static_cast<void>(stream.count()); }, "counting the samples");
  refused([&] { static_cast<void>(stream.schema()); }, "columns");
  const std::vector<std::int64_t> first{0};
  refused([&] { static_cast<void>(stream.read(first)); }, "counting the samples");
  const auto scaled = stream.transform(standard_scaler({"i"}));
  refused([&] { static_cast<void>(scaled.schema()); }, "by their numbers");
  EXPECT_NE(error_of([] { Dataset::from_stream({}); }, ExitCode::usage).find("there is no function"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::items_test
