#include "batch/script.hpp"

#include <gtest/gtest.h>

#include <string>

namespace muster::tool {
namespace {

using std::chrono::seconds;

TEST(BatchScript, ReadsTimesAsSbatchDoes) {
  EXPECT_EQ(parse_time("30"), seconds(30 * 60));
  EXPECT_EQ(parse_time("30:15"), seconds(30 * 60 + 15));
  EXPECT_EQ(parse_time("12:00:01"), seconds(12 * 3600 + 1));
  EXPECT_EQ(parse_time("1-2"), seconds(26 * 3600));
  EXPECT_EQ(parse_time("1-2:3"), seconds(26 * 3600 + 180));
  EXPECT_EQ(parse_time("1-2:3:4"), seconds(26 * 3600 + 184));
  for (const char* const wrong : {"", "0", "0:00", "x", "1h", "1:", ":1", "1:2:3:4", "1-", "1-2-3", "1:2-3", "-5",
                                  "1:-5", "1-2:3:4:5", " 5", "99999999999999999999"})
    EXPECT_FALSE(parse_time(wrong)) << wrong;
}

TEST(BatchScript, QuotesWordsForTheShell) {
  EXPECT_EQ(shell_word("--set=lr=0.01"), "--set=lr=0.01");
  EXPECT_EQ(shell_word(""), "''");
  EXPECT_EQ(shell_word("a b"), "'a b'");
  EXPECT_EQ(shell_word("it's $HOME"), "'it'\\''s $HOME'");
  EXPECT_EQ(shell_word("~"), "'~'");
  EXPECT_EQ(shell_word("é"), "'é'");
  EXPECT_EQ(shell_word("a\nit's \\\t\x1b\x7f"
                       "1é"),
            "$'a\\nit\\'s \\\\\\t\\033\\1771é'")
      << "in one line";
}

TEST(BatchScript, FindsAFlagOfTheProgram) {
  EXPECT_EQ(flag_in({"./fit", "--name", "demo"}, "--name"), "demo");
  EXPECT_EQ(flag_in({"./fit", "--name=a", "--name", "b"}, "--name"), "b") << "as the program takes them";
  EXPECT_FALSE(flag_in({"./fit", "--name"}, "--name"));
  EXPECT_FALSE(flag_in({"--name", "demo"}, "--name")) << "the program itself";
}

TEST(BatchScript, SignalsEarlyEnoughToSave) {
  BatchOptions options{.command = {"./fit"}, .time = seconds(7200)};
  EXPECT_EQ(signal_lead(options), seconds(120));
  options.longest_save = seconds(3);
  EXPECT_EQ(signal_lead(options), seconds(60));
  options.longest_save = seconds(100);
  EXPECT_EQ(signal_lead(options), seconds(330));
  options.time = seconds(60);
  EXPECT_EQ(signal_lead(options), seconds(30)) << "it has to train, too";
}

TEST(BatchScript, NamesTheRun) {
  const auto ends_with = [](const std::string& script, const std::string& end) {
    EXPECT_TRUE(script.ends_with(end + "\n")) << script;
  };
  BatchOptions options{.command = {"./fit"}};
  ends_with(slurm_script(options), " -- ./fit");  // by the program and the job
  options.chain = 2;
  ends_with(slurm_script(options), " -- ./fit --name fit_\"$SLURM_ARRAY_JOB_ID\"");
  options.name = "my run";
  ends_with(slurm_script(options), " -- ./fit --name 'my run'");
  EXPECT_NE(slurm_script(options).find("#SBATCH --job-name=my_run\n"), std::string::npos);
  options.storage = "/shared/runs";
  options.command = {"./fit", "--name", "demo"};
  ends_with(slurm_script(options), " -- ./fit --name demo --storage /shared/runs");
  ends_with(pbs_script({.command = {"./fit"}}), " -- ./fit --name fit_\"${PBS_JOBID%%[!0-9]*}\"");
}

}  // namespace
}  // namespace muster::tool
