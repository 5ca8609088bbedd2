// What errors say.
#pragma once

#include "muster/error.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

namespace muster::test {

/// Returns the text of the Error that `call` throws, and expects that code of it; "no error" if it throws none.
inline std::string error_of(const std::function<void()>& call, ExitCode code = ExitCode::data) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

}  // namespace muster::test
