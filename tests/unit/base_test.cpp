#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/number.hpp"
#include "base/printable.hpp"
#include "base/temporary.hpp"
#include "base/text.hpp"
#include "base/thread_pool.hpp"
#include "muster/error.hpp"
#include "support/failing_memory.hpp"
#include "support/folder.hpp"
#include "support/io_errors.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <latch>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace muster::base_test {
namespace {

class FileTest : public testing::Test {
 protected:
  const test::Folder folder;
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

TEST(Json, IsNestedAsDeepAsTheLimitSays) {
  const auto nested = [](std::size_t levels) { return std::string(levels, '[') + "1" + std::string(levels, ']'); };
  EXPECT_EQ(detail::json_text(detail::parse_json(nested(detail::max_json_depth), "reading it")),
            nested(detail::max_json_depth));
  EXPECT_EQ(message([&] { detail::parse_json(nested(detail::max_json_depth + 1), "reading it"); }, ExitCode::data),
            "reading it: it is nested more than 256 levels deep. Write it flatter, or use another file");
}

TEST(Text, PiecesOfEachTypeAreAsBefore) {
  const char buffer[8] = "buffer";
  EXPECT_EQ(
      detail::str("x", 'y', std::string("z"), std::string_view("view!", 4), buffer, std::filesystem::path("/a/b")),
      "xyzviewbuffer/a/b");
  EXPECT_EQ(detail::str(1, -2L, 3ULL, static_cast<unsigned char>(65), " ", 0.5, std::atomic<int>(7)),
            "1-2365 0.5000007");
  EXPECT_EQ(detail::str(1e300), std::to_string(1e300));
  EXPECT_EQ(detail::counted(1, "rank") + ", " + detail::counted(0U, "rank"), "1 rank, 0 ranks");
}

TEST(Text, FormattedIsAsPrintf) {
  EXPECT_EQ(detail::formatted("%05d %.3g %s%%", 42, 0.12345, "of"), "00042 0.123 of%");
  EXPECT_EQ(detail::formatted("%200d", 1), std::string(127, ' '));  // too long for it: cut off
}

TEST(Error, ControlCharactersOfNamesAreEscaped) {
  EXPECT_STREQ(Error(ExitCode::data, "opening a\x1b[2J\r\x7f", "b\xC2\x9B", "c\nd\te ü").what(),
               "opening a\\x1b[2J\\x0d\\x7f: b\\u009b. c\nd\te ü");
  EXPECT_STREQ(Error(ExitCode::data, "opening a\nb\t", "two\nlines").what(), "opening a\\x0ab\\x09: two\nlines");
}

TEST(Error, BytesThatAreNotUtf8AreEscaped) {
  EXPECT_STREQ(Error(ExitCode::data, "\x9b[2J \xff é€😀 \xc3", "\xe2\x82 \xc0\xaf").what(),
               "\\x9b[2J \\xff é€😀 \\xc3: \\xe2\\x82 \\xc0\\xaf");
}

TEST(Printable, EncodingsThatUtf8DoesNotHaveAreEscaped) {
  EXPECT_EQ(detail::printable("\xE0\x80\x80"), "\\xe0\\x80\\x80") << "longer than needed";
  EXPECT_EQ(detail::printable("\xED\xA0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(detail::printable("\xF0\x80\x80\x80"), "\\xf0\\x80\\x80\\x80");
  EXPECT_EQ(detail::printable("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "above U+10FFFF";
  const std::string most = "\xE0\xA0\x80 \xED\x9F\xBF \xF0\x90\x80\x80 \xF4\x8F\xBF\xBF";
  EXPECT_EQ(detail::printable(most), most);
}

TEST(Printable, IsShortenedBetweenCharacters) {
  using detail::shortened;
  EXPECT_EQ(shortened("abc", 3), "abc");
  EXPECT_EQ(shortened("äöü", 3), "äöü");
  EXPECT_EQ(shortened("abcd", 3), "ab…");
  EXPECT_EQ(shortened("äbcd", 3), "äb…");
  EXPECT_EQ(shortened("aäöü", 3), "aä…");
  EXPECT_EQ(shortened("€€😀😀", 3), "€€…");
  EXPECT_EQ(shortened("ab", 1), "…");
  EXPECT_EQ(shortened("", 0), "");
}

TEST(Log, RefusesUnknownLevels) {
  EXPECT_EQ(detail::log::level_from_name("warn"), detail::log::Level::warn);
  EXPECT_NE(message([] { detail::log::level_from_name("loud"); }, ExitCode::usage).find("trace, debug"),
            std::string::npos);
}

TEST_F(FileTest, WritesAndReadsBack) {
  detail::write_file(folder / "a", "first");
  detail::write_file(folder / "a", "second");
  EXPECT_EQ(detail::read_file(folder / "a"), "second");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "a temporary file was left";
}

TEST_F(FileTest, NamesMissingAndTruncatedFiles) {
  EXPECT_NE(message([&] { detail::read_file(folder / "none"); }, ExitCode::data).find("none"), std::string::npos);
  detail::write_file(folder / "short", "abc");
  const detail::File file(folder / "short", detail::File::Mode::read);
  std::array<std::byte, 8> bytes{};
  EXPECT_NE(message([&] { detail::read_file(folder / "short", 1); }, ExitCode::data).find("it is absurdly large"),
            std::string::npos);
  EXPECT_NE(message([&] { file.read_at(bytes, 0); }, ExitCode::data).find("truncated"), std::string::npos);
}

TEST_F(FileTest, OnlyWhatStandsThereIsAnErrorOfData) {
  for (const int error : {ENOENT, ENOTDIR, EISDIR, ELOOP, ENAMETOOLONG})
    EXPECT_EQ(detail::read_error_code(error), ExitCode::data) << std::strerror(error);
  for (const int error : {EIO, ESTALE, EMFILE, ENFILE, EACCES, EPERM, ENOMEM, EAGAIN, ETIMEDOUT, ENODEV, EREMOTEIO})
    EXPECT_EQ(detail::read_error_code(error), ExitCode::retry) << std::strerror(error);
  message([&] { detail::read_file(folder); }, ExitCode::data);
  message([&] { detail::read_file(folder / std::string(300, 'x')); }, ExitCode::data);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  message([&] { detail::read_file(folder / "a"); }, ExitCode::retry);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(detail::status_of(folder / "none").type(), std::filesystem::file_type::not_found);
  EXPECT_EQ(detail::status_of(folder).type(), std::filesystem::file_type::directory);
}

TEST_F(FileTest, OnlyFilesAreReadAndReplaced) {
  const auto at = [&](const char* name) { return folder / name; };
  ASSERT_EQ(::mkfifo(at("pipe").c_str(), 0600), 0);
  std::filesystem::create_symlink("loop", at("loop"));
  std::filesystem::create_symlink("file", at("link"));
  std::filesystem::create_directory(at("folder"));
  detail::write_file(at("file"), "x");
  EXPECT_NE(message([&] { detail::read_file(at("pipe")); }, ExitCode::data).find("no regular file"), std::string::npos);
  EXPECT_NE(message([&] { detail::read_file("/dev/null"); }, ExitCode::data).find("no regular file"),
            std::string::npos);
  EXPECT_NE(message([&] { detail::read_file(at("loop")); }, ExitCode::data).find("Too many levels"), std::string::npos);
  EXPECT_EQ(detail::read_file(at("link")), "x");
  message([&] { detail::status_of(at("loop") / "x"); }, ExitCode::data);
  message([&] { detail::status_of(folder / std::string(300, 'x')); }, ExitCode::data);

  detail::require_output(at("file"));
  detail::require_output(at("new"));
  for (const char* name : {"pipe", "loop", "link", "folder", "folder/", "none/new", "file/new", "loop/new"})
    message([&] { detail::require_output(at(name)); }, ExitCode::usage);
  message([&] { detail::require_output(folder / std::string(300, 'x')); }, ExitCode::usage);
  for (const char* name : {"file", "file/new", "loop/new"})
    message([&] { detail::make_directories(at(name)); }, ExitCode::usage);
  message([&] { detail::make_directories(folder / std::string(300, 'x')); }, ExitCode::usage);
}

TEST_F(FileTest, LeftoversOfProcessesThatRunStay) {
  const auto of = [&](int process) { return folder / ("a.tmp." + std::to_string(process) + ".0"); };
  const int gone = 1 << 30;  // beyond any process number of Linux
  for (const bool none_writes : {false, true}) {
    for (const int process : {gone, ::getpid()}) detail::write_file(of(process), "half");
    detail::remove_unfinished(folder / "a", none_writes);
    EXPECT_FALSE(std::filesystem::exists(of(gone)));
    EXPECT_EQ(std::filesystem::exists(of(::getpid())), !none_writes);
  }
}

TEST_F(FileTest, LeftoversOfAnotherHostStayForADay) {
  const auto path = folder / "a", own = detail::temporary_beside(path);
  const auto own_name = own.filename().string();
  const auto process = "a.tmp." + std::to_string(::getpid());
  ASSERT_TRUE(own_name.starts_with(process + ".")) << own_name;
  const auto ours = folder / ("a.tmp." + std::to_string(1 << 30) + own_name.substr(process.size()));
  const auto fresh = folder / "a.tmp.1073741824.7.1.0", old = folder / "a.tmp.1073741824.7.1.1";
  for (const auto& file : {own, ours, fresh, old}) detail::write_file(file, "half");
  std::filesystem::last_write_time(old, std::filesystem::last_write_time(old) - std::chrono::hours(25));
  detail::remove_unfinished(path, /*none_writes=*/false);
  EXPECT_TRUE(std::filesystem::exists(own)) << "this process runs";
  EXPECT_FALSE(std::filesystem::exists(ours)) << "no process of this host has that number";
  EXPECT_TRUE(std::filesystem::exists(fresh));
  EXPECT_FALSE(std::filesystem::exists(old));
}

TEST_F(FileTest, RenameNeverReplaces) {
  detail::write_file(folder / "a", "a");
  detail::write_file(folder / "b", "b");
  message([&] { detail::rename_new(folder / "a", folder / "b"); }, ExitCode::retry);
  EXPECT_EQ(detail::read_file(folder / "b"), "b");
  detail::rename_new(folder / "a", folder / "c");
  EXPECT_EQ(detail::read_file(folder / "c"), "a");
}

TEST_F(FileTest, AFolderTakesThePlaceOfAnother) {
  const auto make = [&](const char* name, const char* content) {
    std::filesystem::create_directory(folder / name);
    detail::write_file(folder / name / "file", content);
  };
  const auto count = [&] { return std::distance(std::filesystem::directory_iterator(folder), {}); };
  make("new", "1");
  detail::replace_directory(folder / "new", folder / "it");
  EXPECT_EQ(detail::read_file(folder / "it" / "file"), "1") << "where nothing was";
  make("new", "2");
  detail::replace_directory(folder / "new", folder / "it");
  EXPECT_EQ(detail::read_file(folder / "it" / "file"), "2");
  EXPECT_EQ(count(), 1);
  // A file system that cannot exchange names.
  make("new", "3");
  {
    const test::IoError no_flags("renameat2", "", EINVAL);
    detail::replace_directory(folder / "new", folder / "it");
    EXPECT_GT(no_flags.count(), 0);
    EXPECT_EQ(detail::read_file(folder / "it" / "file"), "3");
    EXPECT_EQ(count(), 1);
    // A missing folder replaces nothing.
    message([&] { detail::replace_directory(folder / "nothing", folder / "it"); }, ExitCode::retry);
    EXPECT_EQ(detail::read_file(folder / "it" / "file"), "3");
    EXPECT_EQ(count(), 1);
  }
  message([&] { detail::replace_directory(folder / "nothing", folder / "it"); }, ExitCode::retry);
  EXPECT_EQ(detail::read_file(folder / "it" / "file"), "3");
  // A kill between the two renames.
  std::filesystem::rename(folder / "it", folder / "it.replaced");
  detail::restore_directory(folder / "it");
  EXPECT_EQ(detail::read_file(folder / "it" / "file"), "3");
  make("new", "4");
  make("it.replaced", "of a user");
  detail::restore_directory(folder / "it");
  detail::replace_directory(folder / "new", folder / "it");
  EXPECT_EQ(detail::read_file(folder / "it" / "file"), "4");
  EXPECT_EQ(detail::read_file(folder / "it.replaced" / "file"), "of a user");
}

TEST_F(FileTest, WritersDoNotFollowLinks) {
  detail::write_file(folder / "precious", "theirs");
  std::filesystem::create_symlink(folder / "precious", folder / "link");
  for (const auto mode : {detail::File::Mode::write, detail::File::Mode::append, detail::File::Mode::create})
    message([&] { detail::File(folder / "link", mode).truncate(0); }, ExitCode::retry);
  message([&] { detail::log::write_to(folder / "link"); }, ExitCode::retry);
  EXPECT_EQ(detail::read_file(folder / "link"), "theirs") << "reading does follow";
  detail::write_file(folder / "link", "ours");
  EXPECT_EQ(detail::read_file(folder / "precious"), "theirs");
  EXPECT_EQ(detail::read_file(folder / "link"), "ours");
}

TEST_F(FileTest, LogsGoToTheEndOfAFile) {
  detail::write_file(folder / "log", "before\n");
  detail::log::write_to(folder / "log");
  detail::log::info("hello");
  const auto text = detail::read_file(folder / "log");
  detail::log::write_to({});
  EXPECT_TRUE(text.starts_with("before\n") && text.ends_with(" info hello\n")) << text;
}

TEST_F(FileTest, AFolderOfSomebodyElseIsRefusedUnlessItsGroupMayWrite) {
  const auto theirs = folder / "theirs";
  detail::make_directories(theirs);
  detail::require_own_directory(theirs);
  std::filesystem::create_directory_symlink(theirs, folder / "link");
  message([&] { detail::require_own_directory(folder / "link"); }, ExitCode::usage);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  ASSERT_EQ(::chown(theirs.c_str(), 65534, 65534), 0);
  EXPECT_NE(message([&] { detail::require_own_directory(theirs); }, ExitCode::usage)
                .find("belongs to nobody. Choose another --name or --storage, or let its owner share it: chmod -R g+w, "
                      "and umask 002 before a start"),
            std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(theirs)) << "what asked for the owner is left";
  ASSERT_EQ(::chmod(theirs.c_str(), 0775), 0);
  message([&] { detail::require_own_directory(theirs); }, ExitCode::usage);  // a group that this user is not in
  // A user who may not lock files at all.
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(::seteuid(65533), 0);
  EXPECT_NE(message([&] { detail::require_own_directory(theirs); }, ExitCode::usage).find("belongs to"),
            std::string::npos);
  ASSERT_EQ(::seteuid(0), 0);
  ASSERT_EQ(::chown(theirs.c_str(), 65534, ::getegid()), 0);
  ASSERT_EQ(::chmod(theirs.c_str(), 0775), 0);
  detail::require_own_directory(theirs);
}

TEST_F(FileTest, AppendGoesToTheEnd) {
  for (const char* text : {"x", "y"}) {
    detail::File file(folder / "log", detail::File::Mode::append);
    file.append(text);
    file.close();
  }
  EXPECT_EQ(detail::read_file(folder / "log"), "xy");
}

TEST(File, FullDiskIsARetryableError) {
  detail::File full("/dev/full", detail::File::Mode::write);
  EXPECT_NE(message([&] { full.append("x"); }, ExitCode::retry)
                .find("No space left on device. Make room there, or choose another path"),
            std::string::npos);
}

TEST_F(FileTest, AnErrorNamesTheFileAndNotTheTemporaryOne) {
  const auto path = folder / "w.pt";
  const auto full = [](detail::File& file) {
    throw Error(ExitCode::retry, "writing " + file.path().string(), "No space left on device", "Make room there");
  };
  EXPECT_EQ(message([&] { detail::write_file(path, full); }, ExitCode::retry),
            "writing " + path.string() + ": No space left on device. Make room there");
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_EQ(message([&] { detail::write_file(folder / "none/w.pt", "x"); }, ExitCode::retry),
            "creating " + (folder / "none/w.pt").string() + ": No such file or directory. Check the path");
}

TEST(File, AFolderIsNoFile) {
  EXPECT_EQ(message([] { detail::File("/proc", detail::File::Mode::read); }, ExitCode::data),
            "opening /proc: Is a directory. Name a file");
}

TEST(TemporaryParent, IsTmpdirUnlessThatIsEmpty) {
  const char* const before = std::getenv("TMPDIR");
  const std::optional<std::string> kept = before ? std::optional<std::string>(before) : std::nullopt;
  ::setenv("TMPDIR", "", 1);
  EXPECT_EQ(detail::temporary_parent(), "/tmp");
  ::setenv("TMPDIR", "/proc", 1);
  EXPECT_EQ(detail::temporary_parent(), "/proc");
  ::setenv("TMPDIR", "/none", 1);
  EXPECT_EQ(message([] { detail::temporary_parent(); }, ExitCode::usage),
            "making a folder for temporary files: TMPDIR is /none, and that is no folder. Set TMPDIR to a folder that "
            "is there");
  kept ? ::setenv("TMPDIR", kept->c_str(), 1) : ::unsetenv("TMPDIR");
}

TEST(Number, FitsOrIsRefused) {
  EXPECT_EQ(detail::checked_cast<std::int64_t>(std::uint64_t{7}, "reading", "a size"), 7);
  EXPECT_EQ(detail::checked_product(std::int64_t{1} << 31, std::int64_t{1} << 31, "reading", "it"),
            std::int64_t{1} << 62);
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
      refused([] { detail::checked_cast<std::int64_t>(std::uint64_t{1} << 63, "reading x", "a dimension"); }),
      "reading x: a dimension is 9223372036854775808, more than 9223372036854775807. Give another, or make the file "
      "anew");
  EXPECT_NE(refused([] { detail::checked_cast<std::uint32_t>(-1, "reading x", "a size"); }).find("less than 0"),
            std::string::npos);
  EXPECT_NE(refused([] { detail::checked_product(std::int64_t{1} << 32, std::int64_t{1} << 31, "reading x", "it"); }),
            "");
}

TEST(ThreadPool, MakesEachCallOnce) {
  detail::ThreadPool threads("muster-test", 3);
  const auto check = [&threads] {
    for (const std::size_t count : {0, 1, 2, 100, 1000}) {
      std::vector<std::atomic<int>> calls(count);
      threads.run(count, [&](std::size_t i) { ++calls[i]; });
      for (const auto& number : calls) EXPECT_EQ(number, 1);
    }
  };
  check();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) callers.emplace_back(check);
  for (auto& caller : callers) caller.join();
}

TEST(ThreadPool, PassesOnAnError) {
  detail::ThreadPool threads("muster-test", 3);
  for (int round = 0; round < 100; ++round) {
    std::atomic<int> calls = 0;
    try {
      threads.run(1000, [&](std::size_t i) {
        ++calls;
        if (i == 3) throw std::runtime_error("call 3");
      });
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "call 3");
    }
    EXPECT_GE(calls, 4);
  }
}

TEST(ThreadPool, MakesAllCallsOrNoneWhereMemoryDoesNotSuffice) {
  int failures = 0;
  for (int round = 0; round < 40; ++round)
    for (int allocations = 0; allocations < 15; ++allocations) {
      std::atomic<int> calls = 0;
      bool has_failed = false;
      {
        detail::ThreadPool threads("muster-test", 3);
        const std::function<void(std::size_t)> count = [&](std::size_t) { ++calls; };
        test::fail_allocation_after(allocations);
        try {
          threads.run(8, count);
        } catch (const std::bad_alloc&) {
          has_failed = true;
        }
        test::fail_allocation_after(-1);
      }
      EXPECT_EQ(calls, has_failed ? 0 : 8) << allocations << " allocations";
      failures += has_failed;
    }
  EXPECT_GT(failures, 0);
}

/// Waits until the task of this thread is unwanted.
void wait_until_unwanted() {
  try {
    for (;; std::this_thread::yield()) detail::ThreadPool::throw_if_unwanted();
  } catch (detail::ThreadPool::Unwanted) {
  }
}

TEST(ThreadPool, DropsWhatHasNotBegunWhenItRestsAndStartsAgain) {
  detail::ThreadPool pool("muster-test", 1);
  for (int round = 0; round < 3; ++round) {
    std::latch begun(1);
    std::atomic<int> done = 0;
    pool.add([&] {
      begun.count_down();
      wait_until_unwanted();
      ++done;
    });
    pool.add([&] { ++done; });
    begun.wait();
    pool.rest();
    EXPECT_EQ(done, 1);
  }
}

TEST(ThreadPool, EndsWhatATaskHasAnotherPoolDoAfterOneCall) {
  detail::ThreadPool decoding("muster-test", 2), ahead("muster-test", 1);
  std::latch begun(1), ended(1);
  std::atomic<int> calls = 0;
  bool is_unwanted = false;
  const auto decode = [&] {
    try {
      decoding.run(1000, [&](std::size_t) {
        if (++calls == 1) begun.count_down();
        wait_until_unwanted();
      });
    } catch (detail::ThreadPool::Unwanted) {
      is_unwanted = true;
    }
    ended.count_down();
  };
  {
    detail::ThreadPool pass("muster-test", 1);
    pass.add([&] {
      ahead.add(decode);
      ended.wait();
    });
    begun.wait();
  }
  EXPECT_TRUE(is_unwanted);
  EXPECT_LE(calls, 3);
  decoding.run(10, [&](std::size_t) { ++calls; });
  EXPECT_GE(calls, 11) << "the other pools go on";
}

}  // namespace
}  // namespace muster::base_test
