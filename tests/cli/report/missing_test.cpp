#include "report/write.hpp"

#include <muster/error.hpp>

#include <gtest/gtest.h>

#include <string>

namespace {

TEST(Report, NamesThePackageThatItWasBuiltWithout) {
  try {
    muster::tool::report::write_report({"run"}, "report.html");
    FAIL() << "a report was written";
  } catch (const muster::Error& error) {
    EXPECT_EQ(error.code(), muster::ExitCode::missing_package);
    EXPECT_NE(std::string(error.what()).find("libsimdjson-dev on Debian"), std::string::npos) << error.what();
  }
}

}  // namespace
