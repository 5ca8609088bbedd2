// Runs a main that trains operators on all ranks of a test.
#pragma once

#include "muster/operator.hpp"
#include "support/job.hpp"

#include <gtest/gtest.h>

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
  std::vector<std::string> words{"job", "--storage", storage().string(), "--log-level", "warn"};
  words.insert(words.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  Launch launch(static_cast<int>(argv.size()), argv.data());
  return launch.run([&] { body(launch); });
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

inline OperatorTrainerOptions all_ranks(const Launch& launch, Config config = Config::object()) {
  return {.config = std::move(config), .num_workers = launch.size()};
}

}  // namespace muster::test
