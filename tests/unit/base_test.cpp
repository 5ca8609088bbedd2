#include "base/file.hpp"
#include "base/log.hpp"
#include "base/number.hpp"
#include "muster/error.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

namespace muster {
namespace {

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = (std::filesystem::temp_directory_path() / "muster-file-XXXXXX").string();
    ASSERT_NE(::mkdtemp(path.data()), nullptr);
    folder = path;
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  std::filesystem::path folder;
};

std::string message(const std::function<void()>& action, ExitCode expected) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected);
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

TEST(Error, SaysWhatFactRemedy) {
  const Error error(ExitCode::data, "opening a.h5", "there is no such file", "Check the path");
  EXPECT_STREQ(error.what(), "opening a.h5: there is no such file. Check the path");
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_STREQ(Error(ExitCode::data, "a", "b").what(), "a: b");
}

TEST(Log, RefusesUnknownLevels) {
  EXPECT_EQ(log::level_from_name("warn"), log::Level::warn);
  EXPECT_NE(message([] { log::level_from_name("loud"); }, ExitCode::usage).find("trace, debug"), std::string::npos);
}

TEST_F(FileTest, WritesAndReadsBack) {
  write_file(folder / "a", "first");
  write_file(folder / "a", "second");
  EXPECT_EQ(read_file(folder / "a"), "second");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "a temporary file was left";
}

TEST_F(FileTest, NamesMissingAndTruncatedFiles) {
  EXPECT_NE(message([&] { read_file(folder / "none"); }, ExitCode::data).find("none"), std::string::npos);
  write_file(folder / "short", "abc");
  const File file(folder / "short", File::Mode::read);
  std::array<std::byte, 8> bytes{};
  EXPECT_NE(message([&] { file.read_at(bytes, 0); }, ExitCode::data).find("truncated"), std::string::npos);
}

TEST_F(FileTest, OnlyWhatStandsThereIsAnErrorOfData) {
  for (const int error : {ENOENT, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG})
    EXPECT_EQ(code_of_reading(error), ExitCode::data) << std::strerror(error);
  for (const int error : {EIO, ESTALE, EMFILE, ENFILE, EACCES, EPERM, ENOMEM, EAGAIN, ETIMEDOUT, ENODEV, EREMOTEIO})
    EXPECT_EQ(code_of_reading(error), ExitCode::retry) << std::strerror(error);
  message([&] { read_file(folder); }, ExitCode::data);
  message([&] { read_file(folder / std::string(300, 'x')); }, ExitCode::data);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  message([&] { read_file(folder / "a"); }, ExitCode::retry);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(status_of(folder / "none").type(), std::filesystem::file_type::not_found);
  EXPECT_EQ(status_of(folder).type(), std::filesystem::file_type::directory);
}

TEST_F(FileTest, RenameNeverReplaces) {
  write_file(folder / "a", "a");
  write_file(folder / "b", "b");
  message([&] { rename_new(folder / "a", folder / "b"); }, ExitCode::retry);
  EXPECT_EQ(read_file(folder / "b"), "b");
  rename_new(folder / "a", folder / "c");
  EXPECT_EQ(read_file(folder / "c"), "a");
}

TEST_F(FileTest, WritersDoNotFollowLinks) {
  write_file(folder / "precious", "theirs");
  std::filesystem::create_symlink(folder / "precious", folder / "link");
  for (const auto mode : {File::Mode::write, File::Mode::append, File::Mode::create})
    message([&] { File(folder / "link", mode).truncate(0); }, ExitCode::retry);
  message([&] { log::write_to(folder / "link"); }, ExitCode::retry);
  EXPECT_EQ(read_file(folder / "link"), "theirs") << "reading does follow";
  write_file(folder / "link", "ours");
  EXPECT_EQ(read_file(folder / "precious"), "theirs");
  EXPECT_EQ(read_file(folder / "link"), "ours");
}

TEST_F(FileTest, LogsGoToTheEndOfAFile) {
  write_file(folder / "log", "before\n");
  log::write_to(folder / "log");
  log::info("hello");
  const auto text = read_file(folder / "log");
  log::write_to({});
  EXPECT_TRUE(text.starts_with("before\n") && text.ends_with(" info hello\n")) << text;
}

TEST_F(FileTest, AFolderOfSomebodyElseIsRefusedUnlessItsGroupMayWrite) {
  const auto theirs = folder / "theirs";
  make_directories(theirs);
  require_own_directory(theirs);
  std::filesystem::create_directory_symlink(theirs, folder / "link");
  message([&] { require_own_directory(folder / "link"); }, ExitCode::usage);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::chown(theirs.c_str(), 65534, 65534), 0);
  EXPECT_NE(message([&] { require_own_directory(theirs); }, ExitCode::usage).find("belongs to"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(theirs)) << "what asked for the owner is left";
  ASSERT_EQ(::chmod(theirs.c_str(), 0775), 0);
  message([&] { require_own_directory(theirs); }, ExitCode::usage);  // a group that this user is not in
  ASSERT_EQ(::chown(theirs.c_str(), 65534, ::getegid()), 0);
  ASSERT_EQ(::chmod(theirs.c_str(), 0775), 0);
  require_own_directory(theirs);
}

TEST_F(FileTest, AppendGoesToTheEnd) {
  for (const char* text : {"x", "y"}) {
    File file(folder / "log", File::Mode::append);
    file.append(text);
    file.close();
  }
  EXPECT_EQ(read_file(folder / "log"), "xy");
}

TEST(File, FullDiskIsARetryableError) {
  File full("/dev/full", File::Mode::write);
  EXPECT_NE(message([&] { full.append("x"); }, ExitCode::retry).find("No space left"), std::string::npos);
}

TEST(Number, FitsOrIsRefused) {
  EXPECT_EQ(checked<std::int64_t>(std::uint64_t{7}, "reading", "a size"), 7);
  EXPECT_EQ(checked_product(std::int64_t{1} << 31, std::int64_t{1} << 31, "reading", "it"), std::int64_t{1} << 62);
  const auto refused = [](auto action) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::data);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(
      refused([] { checked<std::int64_t>(std::uint64_t{1} << 63, "reading x", "a dimension"); }),
      "reading x: a dimension is 9223372036854775808, more than 9223372036854775807. Give another, or make the file "
      "anew");
  EXPECT_NE(refused([] { checked<std::uint32_t>(-1, "reading x", "a size"); }).find("less than 0"), std::string::npos);
  EXPECT_NE(refused([] { checked_product(std::int64_t{1} << 32, std::int64_t{1} << 31, "reading x", "it"); }), "");
}

}  // namespace
}  // namespace muster
