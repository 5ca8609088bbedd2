// Runs a main that trains operators on all ranks of a test.
#pragma once

#include "muster/operator.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>

#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::test {

/// The storage of this process's runs.
inline const std::filesystem::path& storage() {
  static const auto folder = shared_folder();
  return folder;
}

/// The exit code of a main with these flags.
inline int program(const std::vector<std::string>& flags, const std::function<void(Launch&)>& body) {
  return main_with(with_defaults(flags, {{"--storage", storage().string()}, {"--log-level", "warn"}}), body);
}

inline void on_all(const std::function<void(Launch&)>& body) { EXPECT_EQ(program({}, body), 0); }

/// The Error that `call` throws, which must be the same on all ranks.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    for (const auto& theirs : world().all_gather(error.what())) EXPECT_EQ(theirs, error.what());
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" has no \"" << part << "\"";
}

/// `call` fails on all ranks with an Error that has that text.
inline void expect_error(const std::string& part, const std::function<void()>& call) {
  EXPECT_TRUE(has(error_of(call), part));
}

/// A dataset of torch's: 46 samples of a number and its double.
struct Pairs : torch::data::datasets::Dataset<Pairs> {
  torch::data::Example<> get(std::size_t i) override {
    return {at::full({1}, static_cast<double>(i)), at::full({1}, 2.0 * static_cast<double>(i))};
  }
  torch::optional<std::size_t> size() const override { return 46; }
};

inline OperatorTrainerOptions all_ranks(const Launch& launch, Config config = Config::object()) {
  return {.config = std::move(config), .num_workers = launch.size()};
}

}  // namespace muster::test
