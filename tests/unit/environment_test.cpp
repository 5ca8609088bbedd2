// Where and by what a run is trained.
#include "run/environment.hpp"

#include "base/file.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace muster::detail::run::environment_test {
namespace {

namespace fs = std::filesystem;

const std::string commit(40, 'a'), other(40, 'b');

class GitCommit : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    make_directories((folder / path).parent_path());
    write_file(folder / path, text);
  }
  std::string found(const std::string& path) { return git_commit(folder / path); }

  test::Folder folder;
};

TEST_F(GitCommit, IsTheOneOfTheBranch) {
  write(".git/HEAD", "ref: refs/heads/main\n");
  write(".git/refs/heads/main", commit + "\n");
  make_directories(folder / "build/bin");
  EXPECT_EQ(found("build/bin"), commit);
  EXPECT_EQ(found("build/not/there"), commit);
}

TEST_F(GitCommit, IsReadFromPackedBranchesAndDetachedHeads) {
  write("one/.git/HEAD", "ref: refs/heads/main\n");
  write("one/.git/packed-refs",
        "# pack-refs with: peeled\n" + other + " refs/heads/mainline\n" + commit + " refs/heads/main\n");
  EXPECT_EQ(found("one"), commit);
  write("two/.git/HEAD", other + "\n");
  EXPECT_EQ(found("two"), other);
}

TEST_F(GitCommit, IsReadInAFurtherWorkingTree) {
  write("main/.git/HEAD", "ref: refs/heads/main\n");
  write("main/.git/refs/heads/main", other + "\n");
  write("main/.git/refs/heads/side", commit + "\n");
  write("main/.git/worktrees/side/HEAD", "ref: refs/heads/side\n");
  write("main/.git/worktrees/side/commondir", "../..\n");
  write("side/.git", "gitdir: " + (folder.path() / "main/.git/worktrees/side").string() + "\n");
  EXPECT_EQ(found("side"), commit);
}

TEST_F(GitCommit, IsEmptyWhereNothingCanBeRead) {
  write("new/.git/HEAD", "ref: refs/heads/main\n");  // without a commit yet
  EXPECT_EQ(found("new"), "");
  write("broken/.git/HEAD", "nonsense\n");
  EXPECT_EQ(found("broken"), "");
  write("lost/.git", "gitdir: /none\n");
  EXPECT_EQ(found("lost"), "");
  EXPECT_EQ(git_commit("/proc"), "");
  EXPECT_EQ(git_commit({}), "");
}

TEST(Environment, HasWhatIsKnown) {
  ::setenv("LOADEDMODULES", "gcc/12::openmpi/4", 1);
  const auto found = environment();
  ::unsetenv("LOADEDMODULES");
  EXPECT_EQ(found.at("modules"), Json({"gcc/12", "openmpi/4"}));
  EXPECT_NE(found.at("mpi").get<std::string>(), "");
  EXPECT_EQ(found.at("mpi").get<std::string>().find('\n'), std::string::npos);
  EXPECT_NE(found.at("libtorch").get<std::string>(), "");
  EXPECT_TRUE(found.at("command").at(0).get<std::string>().ends_with("train_unit_test"));
  EXPECT_FALSE(environment().contains("modules"));
}

}  // namespace
}  // namespace muster::detail::run::environment_test
