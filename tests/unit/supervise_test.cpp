// What `muster run` reads and decides, without starting a process.
#include "base/temporary.hpp"
#include "muster/error.hpp"
#include "supervise/decision.hpp"
#include "supervise/launch_command.hpp"
#include "supervise/lost_hosts.hpp"
#include "supervise/slurm.hpp"
#include "supervise/temporary_folders.hpp"
#include "support/errors.hpp"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::detail::supervise::supervise_test {
namespace {

using run::Failures;

const std::string dashes(74, '-');

TEST(TemporaryFolders, OnlyThoseOfDeadProcessesAreRemoved) {
  namespace fs = std::filesystem;
  char parent[] = "/tmp/own_folders_XXXXXX";
  ASSERT_NE(::mkdtemp(parent), nullptr);
  const std::string dead = "muster-run-999999999-abcdef";
  const std::vector<std::string> others{"muster-run-demo", "muster-run-999999999-abcdefg", "muster-run--abcdef",
                                        "muster-run-" + std::to_string(::getpid()) + "-abcdef"};
  for (const auto& name : others) fs::create_directories(fs::path(parent) / name / "runs");
  fs::create_directories(fs::path(parent) / dead / "runs");
  const char* const before = std::getenv("TMPDIR");
  const std::optional<std::string> kept = before ? std::optional<std::string>(before) : std::nullopt;
  ::setenv("TMPDIR", parent, 1);
  { const TemporaryFolders own; }
  kept ? ::setenv("TMPDIR", kept->c_str(), 1) : ::unsetenv("TMPDIR");
  EXPECT_FALSE(fs::exists(fs::path(parent) / dead));
  for (const auto& name : others) EXPECT_TRUE(fs::exists(fs::path(parent) / name / "runs")) << name;
  fs::remove_all(parent);
}

TEST(LauncherOutput, PassesOnWhatRanksWrite) {
  LauncherOutput output;
  EXPECT_EQ(output.take("epoch 1\nepoch"), "epoch 1\nepoch");
  EXPECT_EQ(output.take(" 2"), " 2");
  EXPECT_EQ(output.take("\n\r 10%"), "\n\r 10%");
  EXPECT_EQ(output.take("\r 20%\r\033[Kdone\n"), "\r 20%\r\033[Kdone\n");
  EXPECT_EQ(output.take("a table\n" + dashes + "\n"), "a table\n");
  EXPECT_EQ(output.take("x | y\n" + dashes + "\n1 | 2\n"), dashes + "\nx | y\n" + dashes + "\n1 | 2\n");
  EXPECT_EQ(output.take("muster: "), "");
  EXPECT_EQ(output.take("warning: slow\n"), "muster: warning: slow\n");
  EXPECT_EQ(output.take("12 of 13"), "");
  EXPECT_EQ(output.finish(), "12 of 13");
  EXPECT_EQ(output.report().error, "");
}

TEST(LauncherOutput, KeepsWhatIsForTheSupervisor) {
  LauncherOutput output;
  EXPECT_EQ(output.take("one\n\x1emuster run /runs/demo\nmuster: error: rank 1 (n1): full\nmuster: error: later\n"),
            "one\n");
  EXPECT_EQ(output.take("\r 10%\r\033[Kmuster: error: third\n\x1emuster returned 65\n"), "\r 10%\r\033[K");
  EXPECT_EQ(output.report().run, "/runs/demo");
  EXPECT_EQ(output.report().error, "rank 1 (n1): full");
  EXPECT_EQ(output.report().returned_code, 65);
  EXPECT_FALSE(output.report().ended);
  output.take("\x1emuster ended \n");
  EXPECT_TRUE(output.report().ended);
}

TEST(LauncherOutput, KeepsWhatIsForTheSupervisorInTaggedLines) {
  LauncherOutput output;
  EXPECT_EQ(output.take("[1,0]<stderr>:\x1emuster run /runs/demo\n[1,1]<stderr>:a line\n"), "[1,1]<stderr>:a line\n");
  EXPECT_EQ(output.take("[1,1]<stderr>:muster: error: full\n"), "");
  EXPECT_EQ(output.report().run, "/runs/demo");
  EXPECT_EQ(output.report().error, "full");
}

TEST(LauncherOutput, KeepsWhatIsEnoughAndWhoTookThePlace) {
  LauncherOutput output;
  EXPECT_FALSE(output.report().has_error_file) << "an error.txt that is there is of an earlier start";
  EXPECT_EQ(output.take("\x1emuster cause /runs/demo\n"), "");
  EXPECT_TRUE(output.report().has_error_file);
  EXPECT_EQ(output.take("\x1emuster least 2\n"), "");
  EXPECT_EQ(output.report().min_workers, 2);
  EXPECT_FALSE(output.report().preempted);
  output.take("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n");
  EXPECT_FALSE(output.report().preempted);
  output.take("slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n");
  EXPECT_TRUE(output.report().preempted);
}

TEST(LauncherOutput, KeepsHowFarTheRanksHaveCome) {
  LauncherOutput output;
  EXPECT_FALSE(output.report().loaded);
  EXPECT_EQ(output.take("\x1emuster loaded \n"), "");
  EXPECT_TRUE(output.report().loaded);
  EXPECT_FALSE(output.report().starting);
  EXPECT_EQ(output.take("\x1emuster starting \n\x1emuster up 4\n"), "");
  EXPECT_TRUE(output.report().starting);
  EXPECT_TRUE(output.report().up);
  EXPECT_EQ(output.take("\x1emuster silent n2\n\x1emuster silent n3\n\x1emuster leaving 75\n\x1emuster leaving 1\n"),
            "");
  EXPECT_EQ(output.report().silent, "n2") << "the first one that was seen";
  EXPECT_EQ(output.report().leaving, 75);
}

TEST(LauncherOutput, KeepsWhoExitsWithoutFinalizing) {
  LauncherOutput output;
  const std::string dashes(74, '-');
  EXPECT_EQ(
      output.take(dashes +
                  "\nmpirun has exited due to process rank 1 with PID 4711 on\nnode n1 exiting improperly. There "
                  "are three reasons this could occur:\n\n1. this process did not call \"init\" before exiting\n" +
                  dashes + "\n"),
      "");
  EXPECT_EQ(cause_of({.code = 1, .report = output.report()}, ""),
            "the program ended without MPI_Finalize, as by _exit(), on rank 1");
  EXPECT_EQ(cause_of({.code = 1, .report = {.exited_improperly = true}}, ""),
            "the program ended without MPI_Finalize, as by _exit()");
}

TEST(LauncherOutput, KeepsTheFirstRankThatExits) {
  LauncherOutput output;
  EXPECT_EQ(output.take("\x1emuster exit 1 7 n2\n\x1emuster exit 0 9 n1\n"), "");
  EXPECT_EQ(output.report().failed_rank, 1);
  EXPECT_EQ(cause_of({.code = 7, .report = output.report()}, ""),
            "the program ended with exit code 7 on rank 1, host n2");
  LauncherOutput agreed;
  agreed.take("\x1emuster returned 1\n\x1emuster exit 3 1 n1\n");
  EXPECT_FALSE(agreed.report().failed_rank) << "all ranks exit so";
  LauncherOutput afterwards;
  afterwards.take("\x1emuster returned 0\n\x1emuster exit 3 9 n2\n");
  EXPECT_EQ(cause_of({.code = 9, .report = afterwards.report()}, ""),
            "the program ended with exit code 9 on rank 3, host n2");
}

TEST(Patience, IsForRanksThatHaveFailedAndNotForWorkAfterTraining) {
  LauncherReport report;
  EXPECT_FALSE(open_mpi.patience(report));
  report.returned_code = 0;
  EXPECT_FALSE(open_mpi.patience(report)) << "the program may go on";
  report.failed_rank = 1;
  EXPECT_FALSE(open_mpi.patience(report));
  EXPECT_EQ(srun.patience(report), std::chrono::seconds(1));
  report = {.leaving = 75};
  EXPECT_EQ(open_mpi.patience(report), std::chrono::seconds(10));
}

TEST(ExitCodes, AStopIsKnownByItsCodeWhereTheRanksAreNotHeard) {
  JobEnd end{.code = static_cast<int>(ExitCode::stopped), .stop_requested = true};
  EXPECT_TRUE(has_started(end));
  EXPECT_EQ(exit_code_of(end), static_cast<int>(ExitCode::stopped));
  end.code = 0;
  EXPECT_EQ(exit_code_of(end), static_cast<int>(ExitCode::retry))
      << "mpirun that is told to stop before its ranks are there";
}

TEST(ExitCodes, ARankThatAStopSignalEndsBeforeItsLaunchIsStopped) {
  for (const int signal : {SIGUSR1, SIGUSR2, SIGHUP}) {
    JobEnd end{.code = 128 + signal, .report = {.loaded = true, .lost_rank = LostRank{1, "n1", signal}}};
    EXPECT_TRUE(was_stopped_early(end));
    EXPECT_FALSE(is_failure(end, /*stop_requested=*/false));
    end.report.lost_rank.reset();  // only the code says so
    EXPECT_TRUE(was_stopped_early(end));
    end.report.lost_host = "n2";
    EXPECT_FALSE(was_stopped_early(end)) << "a daemon that is lost may end the rank";
    end.report.lost_host.reset();
    end.report.returned_code = 0;
    EXPECT_FALSE(was_stopped_early(end)) << "its Launch is over";
  }
  const JobEnd killed{.code = 137, .report = {.lost_rank = LostRank{1, "n1", SIGKILL}}};
  EXPECT_FALSE(was_stopped_early(killed));
  EXPECT_TRUE(is_failure(killed, /*stop_requested=*/false));
}

TEST(LauncherOutput, KeepsBannersOfOtherEndsAway) {
  LauncherOutput output;
  EXPECT_EQ(
      output.take(dashes + "\nmpiexec has exited due to process rank 1 with PID 0 on\nnode n1 exiting improperly.\n" +
                  dashes + "\n" + dashes + "\nAn MPI communication peer process has unexpectedly disconnected.\n" +
                  dashes + "\nafter\n"),
      "after\n");
  EXPECT_EQ(output.take("[n1:1] [[1,0],0] ORTE_ERROR_LOG: Unreachable in file x.c at line 3\n"), "");
}

TEST(LauncherOutput, HearsWhatComesBehindALineThatHasNotEnded) {
  LauncherOutput output;
  EXPECT_EQ(output.take("loading ...\x1emuster run /runs/demo\ndone\n"), "loading ...done\n");
  EXPECT_EQ(output.report().run, "/runs/demo");
  EXPECT_EQ(output.take("\r 10%" + dashes +
                        "\nmpirun noticed that process rank 3 with PID 0 on node n2 exited on signal 9 "
                        "(Killed).\n" +
                        dashes + "\nafter\n"),
            "\r 10%" + dashes + "\nafter\n");
  ASSERT_TRUE(output.report().lost_rank);
  EXPECT_EQ(output.report().lost_rank->rank, 3);
  EXPECT_EQ(output.take("a title " + dashes + "\nx | y\n"), "a title " + dashes + "\nx | y\n");
  EXPECT_EQ(output.take("one\x1etwo\n"), "one\x1etwo\n");
  EXPECT_EQ(output.finish(), "");
}

TEST(LauncherOutput, TakesLongLinesAtOnce) {
  LauncherOutput output;
  for (const char c : {'-', '[', '0', 'x', '\0'}) {
    const auto line = std::string(4'000'000, c) + "\n";
    EXPECT_TRUE(output.take(line) == line) << c;
  }
}

TEST(LauncherOutput, WhatTheProgramWasUnableToDoIsNotTheLaunchers) {
  LauncherOutput output;
  const auto table = dashes + "\nThe loader was unable to open the cache\n" + dashes + "\n";
  auto shown = output.take(table);
  shown += output.finish();
  EXPECT_EQ(shown, table);
  EXPECT_EQ(output.report().launcher_error, "");
}

TEST(LauncherOutput, KeepsTheBannersOfMpirun) {
  LauncherOutput output;
  EXPECT_EQ(output.take(dashes +
                        "\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. Per "
                        "user-direction, the job has been aborted.\n" +
                        dashes + "\n" + dashes +
                        "\nmpiexec noticed that process rank 3 with PID 0 on node n2 exited on signal 11 (Segmentation "
                        "fault).\n" +
                        dashes + "\nafter\n"),
            "after\n");
  ASSERT_TRUE(output.report().lost_rank);
  EXPECT_EQ(output.report().lost_rank->rank, 3);
  EXPECT_EQ(output.report().lost_rank->host, "n2");
  EXPECT_EQ(output.report().lost_rank->signal, 11);
  EXPECT_EQ(output.report().launcher_error, "");

  LauncherOutput exits;
  exits.take(dashes +
             "\nmpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be "
             "terminated. The first process to do so was:\n\n  Process name: [[26155,1],1]\n  Exit code:    3\n" +
             dashes + "\n");
  EXPECT_EQ(exits.report().failed_rank, 1);
  EXPECT_FALSE(exits.report().lost_rank);
}

TEST(LauncherOutput, KeepsWhyThereAreNoRanks) {
  LauncherOutput output;
  EXPECT_EQ(output.take("[n1:1234] 1 more process has sent help message help-mpi-api.txt / mpi-abort\n" + dashes +
                        "\nORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[1,0],0] on node "
                        "n1\n  Remote daemon: [[1,0],1] on node n2\n\nThis is usually due to a failure.\n" +
                        dashes + "\n"),
            "");
  EXPECT_EQ(output.report().lost_host, "n2");
  EXPECT_EQ(output.report().launcher_error, "ORTE has lost communication with a remote daemon, on n2");
}

TEST(LauncherOutput, NamesTheHostThatCannotBeReached) {
  const std::string unable =
      dashes +
      "\nORTE was unable to reliably start one or more daemons.\nThis usually is caused by:\n\n* not "
      "finding the required libraries and/or binaries on\n  one or more nodes.\n" +
      dashes + "\n";
  for (const std::string said : {"ssh: connect to host n2.cluster port 22: No route to host",
                                 "ssh: Could not resolve hostname n2.cluster: Name or service not known"}) {
    LauncherOutput output;
    EXPECT_EQ(output.take(said + "\r\n" + unable), said + "\r\n") << "a program may use ssh as well";
    EXPECT_EQ(output.report().lost_host, "n2.cluster");
    EXPECT_EQ(output.report().launcher_error, said);
  }
  LauncherOutput of_the_program;
  of_the_program.take("ssh: connect to host n2 port 22: No route to host\n");
  EXPECT_FALSE(of_the_program.report().lost_host);

  LauncherOutput unknown;
  unknown.take(unable);
  EXPECT_EQ(unknown.report().launcher_error, "ORTE was unable to reliably start one or more daemons")
      << "no half sentence";
  EXPECT_FALSE(unknown.report().lost_host);
}

TEST(LauncherOutput, KeepsTheMessagesOfOpenMpi5) {
  const std::string rule(74, '-');
  LauncherOutput lost;
  EXPECT_EQ(lost.take(rule +
                      "\nprterun noticed that process rank 1 with PID 19549 on node n1 exited on\nsignal 9 "
                      "(Killed).\n" +
                      rule + "\n"),
            "");
  ASSERT_TRUE(lost.report().lost_rank);
  EXPECT_EQ(lost.report().lost_rank->rank, 1);
  EXPECT_EQ(lost.report().lost_rank->host, "n1");
  EXPECT_EQ(lost.report().lost_rank->signal, 9);
  LauncherOutput failed;
  EXPECT_EQ(failed.take(rule +
                        "\nprterun detected that one or more processes exited with non-zero status,\nthus causing "
                        "the job to be terminated. The first process to do so was:\n\n   Process name: "
                        "[prterun-n1-19570@1,3]\n   Exit code:    3\n" +
                        rule + "\n"),
            "");
  EXPECT_EQ(failed.report().failed_rank, 3);
  LauncherOutput host;
  EXPECT_EQ(host.take(rule +
                      "\nPRTE has lost communication with a remote daemon.\n\n  HNP daemon   : [prterun-n1-5@0,0] "
                      "on node n1\n  Remote daemon: [prterun-n1-5@0,1] on node n2\n\nThis is usually due to\n" +
                      rule + "\n"),
            "");
  EXPECT_EQ(host.report().lost_host, "n2");
  EXPECT_EQ(host.report().launcher_error, "PRTE has lost communication with a remote daemon, on n2");
  LauncherOutput program;
  EXPECT_EQ(program.take(rule +
                         "\nPRTE tried to fork a new process via the \"execve\" system call but\nfailed.\n\n  Local "
                         "host:        n1\n  Application name:  /tmp/fit\n  Error:             Exec format error\n" +
                         rule + "\n"),
            "");
  EXPECT_TRUE(program.report().no_program);
  EXPECT_EQ(program.report().launcher_error, "starting /tmp/fit: Exec format error");
  EXPECT_EQ(program.take(std::string("\0a\0b\n", 5)), std::string("a\0b\n", 4)) << "the end of PRTE's string";
}

TEST(LauncherOutput, KeepsTheMessagesOfHydra) {
  const std::string line(83, '=');
  const auto message = [&](const std::string& items) {
    return "\n" + line + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n" + items +
           "=   CLEANING UP REMAINING PROCESSES\n" + line +
           "\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis typically refers to a problem "
           "with "
           "your application.\nPlease see the FAQ page for debugging suggestions\n";
  };
  LauncherOutput lost;
  EXPECT_EQ(
      lost.take("\x1emuster process 0 4710 n1.cluster\n\x1emuster process 2 4711 n2.cluster\n\x1emuster process 1 "
                "4711 n1.cluster\n"),
      "");
  EXPECT_EQ(lost.take(message("=   PID 4711 RUNNING AT n1\n=   EXIT CODE: 9\n")), "\n");
  ASSERT_TRUE(lost.report().lost_rank);
  EXPECT_EQ(lost.report().lost_rank->rank, 1);
  EXPECT_EQ(lost.report().lost_rank->signal, 9);
  LauncherOutput unknown;
  unknown.take(message("=   PID 4711 RUNNING AT n1\n=   EXIT CODE: 11\n"));
  ASSERT_TRUE(unknown.report().lost_rank);
  EXPECT_EQ(cause_of({.report = {.lost_rank = LostRank{2, "n1", 9}}, .programs = {"./heat", "./heat", "./fit"}}, ""),
            "rank 2 (n1, ./fit) was ended by signal 9 (Killed), as the kernel does when memory runs out");
  EXPECT_EQ(log_hint({.report = {.run = "/r", .lost_rank = LostRank{2, "n1", 9}}, .programs = {"./fit"}}),
            "The logs of the ranks are in /r/logs")
      << "their numbers are a program's own";
  EXPECT_TRUE(cause_of({.report = unknown.report()}, "").starts_with("a rank (n1) was ended by signal 11"));
  LauncherOutput intel;
  EXPECT_EQ(intel.take(message("=   RANK 3 PID 4711 RUNNING AT n1\n=   KILLED BY SIGNAL: 9 (Killed)\n")), "\n");
  ASSERT_TRUE(intel.report().lost_rank);
  EXPECT_EQ(intel.report().lost_rank->rank, 3);
  EXPECT_EQ(intel.report().lost_rank->signal, 9);
  LauncherOutput program;
  EXPECT_EQ(
      program.take("[proxy:0:0@n1] HYDU_create_process (utils/launch/launch.c:73): execvp error on file /no/such (No "
                   "such file or directory)\n"),
      "");
  EXPECT_TRUE(program.report().no_program);
  EXPECT_EQ(program.report().launcher_error, "starting /no/such (No such file or directory)");
  const std::string unknown_trouble = "[mpiexec@n1] wait_for_completion: unable to reach n2\n";
  EXPECT_EQ(program.take(unknown_trouble), unknown_trouble);
  LauncherOutput own;
  EXPECT_EQ(own.take(line + "\nRESULTS\n" + line + "\n"), line + "\nRESULTS\n") << "held back until the next line";
  EXPECT_EQ(own.finish(), line + "\n");
}

TEST(LauncherOutput, KeepsTheWordsOfSrun) {
  LauncherOutput output;
  EXPECT_EQ(output.take(
                "srun: error: n2: task 3: Killed\nsrun: Terminating StepId=5.0\nslurmstepd: error: *** STEP 5.0 "
                "ON n1 CANCELLED AT 2026-11-22T11:00:00 ***\nslurmstepd-n1: error:  mpi/pmix_v4: _errhandler: n1 [0]: "
                "pmixp_client_v2.c:211: Error handler invoked: status = -61, source = [slurm.pmix.1.0:1]\nhere\n"),
            "here\n");
  ASSERT_TRUE(output.report().lost_rank);
  EXPECT_EQ(output.report().lost_rank->rank, 3);
  EXPECT_EQ(output.report().lost_rank->signal, 9);
  LauncherOutput exits;
  exits.take("srun: error: n1: task 1: Exited with exit code 3\n");
  EXPECT_EQ(exits.report().failed_rank, 1);
  EXPECT_EQ(exits.report().exit_code, 3);
  EXPECT_FALSE(exits.report().lost_rank);
  for (const char* text :
       {"srun: error: n1: task 1: Exited with exit code 65\nsrun: error: n2: task 3: Terminated\n",
        "srun: error: n2: task 3: Terminated\nsrun: error: n1: task 1: Exited with exit code 65\n"}) {
    LauncherOutput ended;
    ended.take(text);
    EXPECT_EQ(ended.report().failed_rank, 1) << text;
    EXPECT_FALSE(ended.report().lost_rank) << text;
  }
  for (const char* text : {"srun: error: n2: task 3: Killed\nsrun: error: n1: task 1: Terminated\n",
                           "srun: error: n1: task 1: Terminated\nsrun: error: n2: task 3: Killed\n",
                           "srun: error: n2: tasks 3-4: Killed\nsrun: error: n1: task 1: Exited with exit code 75\n"}) {
    LauncherOutput killed;
    killed.take(text);
    ASSERT_TRUE(killed.report().lost_rank) << text;
    EXPECT_EQ(killed.report().lost_rank->rank, 3) << text;
    EXPECT_EQ(killed.report().lost_rank->signal, 9) << text;
    EXPECT_FALSE(killed.report().exit_code) << text;
  }
  LauncherOutput busy;
  const std::string retrying = "srun: Job 6 step creation temporarily disabled, retrying (Requested nodes are busy)\n";
  EXPECT_EQ(busy.take(retrying), retrying) << "it says why nothing starts";
  EXPECT_EQ(busy.take(retrying), "") << "once";
  EXPECT_EQ(busy.report().slurm + "\n", retrying);
  LauncherOutput too_many;
  EXPECT_EQ(too_many.take("srun: error: Unable to create step for job 6: More processors requested than permitted\n"),
            "");
  EXPECT_EQ(too_many.report().launcher_error, "Slurm cannot start the ranks: More processors requested than permitted");
  LauncherOutput node;
  EXPECT_EQ(node.take("srun: error: Node failure on n2\nslurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED ***\n"), "");
  EXPECT_EQ(node.report().lost_host, "n2");
  EXPECT_EQ(node.report().launcher_error, "Slurm has lost the node n2");
  LauncherOutput unreached;
  EXPECT_EQ(
      unreached.take("srun: error: Task launch for StepId=1.1 failed on node n2: Communication connection failure\n"
                     "srun: error: Application launch failed: Communication connection failure\n"
                     "srun: error: n1: task 0: Killed\n"),
      "");
  EXPECT_EQ(unreached.report().lost_host, "n2");
  EXPECT_EQ(cause_of({.code = 137, .report = unreached.report()}, ""), "Slurm cannot start a rank on the node n2");
  LauncherOutput aborted;
  aborted.take(
      "muster: error: rank 1 (n1): calling MPI_Isend: no\n\x1emuster leaving 75\n"
      "srun: error: n1: task 0: Killed\n");
  EXPECT_EQ(cause_of({.code = 137, .report = aborted.report()}, ""), "rank 1 (n1): calling MPI_Isend: no");
  LauncherOutput away;
  EXPECT_EQ(
      away.take("srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect "
                "failure)\nsrun: Check SLURM_JOB_ID environment variable. Expired or invalid job 1\n"),
      "");
  const JobEnd nothing_started{.code = 1, .report = away.report()};
  const JobRequirements requirements{.ranks = 4, .min_workers = 1, .max_failures = 1};
  EXPECT_EQ(cause_of(nothing_started, ""), "Slurm's controller does not answer");
  EXPECT_EQ(exit_code_of(nothing_started), 75);
  EXPECT_TRUE(is_preemption(nothing_started));
  EXPECT_EQ(decide(nothing_started, {.count = 3}, requirements, 4, false).ranks, 4);
  LauncherOutput not_launched;
  EXPECT_EQ(
      not_launched.take("srun: launch/slurm: launch_p_step_launch: StepId=1.0 aborted before step completely "
                        "launched.\nsrun: error: task 2 launch failed: Unspecified error\n"
                        "srun: error: task 3 launch failed: Unspecified error\nsrun: error: n1: task 0: Killed\n"),
      "");
  const JobEnd end{.code = 137, .report = not_launched.report()};
  EXPECT_EQ(decide(end, {.count = 1}, requirements, 4, false).ranks, 4) << "only one could not be started this time";
  EXPECT_EQ(cause_of(end, ""), "Slurm cannot start rank 2: Unspecified error");
  EXPECT_EQ(exit_code_of(end), 75);
  // srun itself may end with 0 then, as if the program had done its work.
  EXPECT_EQ(exit_code_of({.code = 0, .report = not_launched.report()}), 75);
  EXPECT_EQ(exit_code_of({.code = 0, .report = node.report()}), 75);
  LauncherOutput cancelled;
  cancelled.take("\x1emuster loaded\nslurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n");
  EXPECT_EQ(exit_code_of({.code = 0, .report = cancelled.report()}), 75);
  EXPECT_EQ(cause_of({.code = 0, .report = cancelled.report()}, ""), "Slurm has cancelled the step of the ranks");
  EXPECT_EQ(exit_code_of({.code = 0, .report = cancelled.report(), .stop_requested = true}), 0);
  cancelled.take("\x1emuster returned 0\n");
  EXPECT_EQ(exit_code_of({.code = 0, .report = cancelled.report()}), 0) << "the program has done its work before";
}

TEST(LauncherOutput, KeepsTheWordsOfFlux) {
  const std::string fact = "./fit: task rank 3 on host n2 failed and exit-on-error is set\n";
  LauncherOutput killed;
  EXPECT_EQ(killed.take("2.134s: flux-shell[0]: FATAL: doom: " + fact + "2.250s: job.exception type=exec severity=0 " +
                        fact + "flux-job: task(s) Killed\n12.5s: a step\n0.3s: flux-shell[1]:  WARN: affinity: none\n"),
            "12.5s: a step\n0.3s: flux-shell[1]:  WARN: affinity: none\n");
  ASSERT_TRUE(killed.report().lost_rank);
  EXPECT_EQ(killed.report().lost_rank->rank, 3);
  EXPECT_EQ(killed.report().lost_rank->host, "n2");
  EXPECT_EQ(killed.report().lost_rank->signal, 9);
  LauncherOutput exits;
  exits.take("2.250s: job.exception type=exec severity=0 " + fact + "flux-job: task(s) exited with exit code 3\n");
  EXPECT_FALSE(exits.report().lost_rank);
  EXPECT_EQ(cause_of({.code = 3, .report = exits.report()}, ""),
            "the program ended with exit code 3 on rank 3, host n2");
  for (const char* const said : {"1.5s: job.exception type=node-failure severity=2 node failure on n2 (shell rank 1)\n",
                                 "1.5s: job.exception type=exec severity=0 lost contact with job shell on broker n2 "
                                 "(rank 1)\n"}) {
    LauncherOutput node;
    EXPECT_EQ(node.take(std::string("\x1emuster loaded \n") + said), "") << said;
    EXPECT_EQ(node.report().lost_host, "n2") << said;
    EXPECT_EQ(node.report().launcher_error, "Flux has lost the node n2") << said;
  }
  LauncherOutput too_many;
  EXPECT_EQ(too_many.take("0.020s: job.exception type=alloc severity=0 unsatisfiable request\n"), "");
  EXPECT_EQ(too_many.report().launcher_error, "Flux cannot start the ranks: unsatisfiable request");
  LauncherOutput program;
  EXPECT_EQ(program.take("0.1s: flux-shell[0]: FATAL: task 0 (host n1): start failed: ./fit: Permission denied\n"), "");
  EXPECT_TRUE(program.report().no_program);
  EXPECT_EQ(program.report().launcher_error, "starting ./fit: Permission denied");
  LauncherOutput ended;
  EXPECT_EQ(ended.take("\x1emuster loaded \nflux-job: one more ctrl-C within 2s to cancel or ctrl-Z to detach\n"
                       "9.0s: job.exception type=cancel severity=0 interrupted by ctrl-C\n"),
            "");
  EXPECT_EQ(ended.report().launcher_error, "") << "we have ended it";
}

JobEnd lost_rank() { return {.code = 137, .report = {.lost_rank = LostRank{1, "n1", 9}}}; }

TEST(Verdict, CodesComeThrough) {
  for (const int code : {0, 1, 7, 64, 65, 69, 75, 85, 130, 200}) EXPECT_EQ(exit_code_of({.code = code}), code);
  EXPECT_EQ(exit_code_of(lost_rank()), 75);
  EXPECT_EQ(exit_code_of({.launcher_signal = 9}), 75);
  EXPECT_EQ(exit_code_of({.code = 137}), 75);
  EXPECT_EQ(exit_code_of({.exceeded_grace = true}), 75);
  EXPECT_EQ(exit_code_of({.code = 1, .report = {.launcher_error = "There are not enough slots"}}), 75);
  EXPECT_EQ(exit_code_of({.code = 0, .report = {.launcher_error = "fit was unable to say goodbye"}}), 0);
  EXPECT_EQ(exit_code_of({.code = 1, .report = {.slurm = "srun: fatal: Could not establish a configuration source"}}),
            75);
  EXPECT_EQ(exit_code_of({.code = 1, .report = {.slurm = "srun: Job step created"}}), 1);
}

TEST(Verdict, AFinishedJobNeverEndsAsFailed) {
  auto end = lost_rank();
  end.report.returned_code = 0;
  EXPECT_EQ(exit_code_of(end), 0);
  EXPECT_EQ(exit_code_of({.launcher_signal = 9, .report = {.returned_code = 0}}), 0);
  EXPECT_EQ(exit_code_of({.code = 137, .report = {.returned_code = 65}}), 65);
  EXPECT_EQ(exit_code_of({.code = 3, .report = {.returned_code = 0}}), 0) << "the program's own, after that";
  EXPECT_EQ(exit_code_of({.code = 3, .report = {.returned_code = 65}}), 3);
}

TEST(Verdict, NothingThatDidNotRunIsDone) {
  EXPECT_EQ(exit_code_of({.code = 0, .stop_requested = true}), 75) << "stopped before a rank was there";
  EXPECT_EQ(exit_code_of({.code = 0, .report = {.loaded = true}, .stop_requested = true}), 0)
      << "a program without a run";
  EXPECT_EQ(exit_code_of({.code = 0, .not_up = true}), 75);
  EXPECT_NE(cause_of({.not_up = true}, "").find("did not come together"), std::string::npos);
  EXPECT_EQ(
      cause_of({.report = {.launcher_error = "the node n2 does not answer", .lost_host = "n2"}, .not_up = true}, ""),
      "the node n2 does not answer");
}

TEST(Verdict, WhatIsTriedAgain) {
  const JobRequirements requirements{.ranks = 2, .min_workers = 2, .max_failures = 3};
  const Failures first{.count = 1};
  for (const int code : {64, 65, 69, 85, 130})
    EXPECT_FALSE(decide({.code = code}, first, requirements, 2, false).again);
  for (const int code : {1, 7, 75}) EXPECT_TRUE(decide({.code = code}, first, requirements, 2, false).again);
  EXPECT_TRUE(decide(lost_rank(), first, requirements, 2, false).again);
  EXPECT_FALSE(decide(lost_rank(), first, requirements, 2, /*stop_wished=*/true).again);
  EXPECT_FALSE(decide({.code = 75, .report = {.stopped = true}}, first, requirements, 2, false).again);
  EXPECT_TRUE(decide(lost_rank(), {.count = 3}, requirements, 2, false).again);
  const auto last = decide(lost_rank(), {.count = 4}, requirements, 2, false);
  EXPECT_FALSE(last.again);
  EXPECT_EQ(last.code, 75);
}

TEST(Verdict, ARunWhoseRanksAreNotThroughIsNotDone) {
  EXPECT_TRUE(is_unfinished({.code = 0, .report = {.starting = true, .run = "/runs/demo"}}));
  EXPECT_FALSE(is_unfinished({.code = 0, .report = {.starting = true, .run = "/runs/demo", .returned_code = 0}}));
  EXPECT_FALSE(is_unfinished({.code = 0, .report = {.run = "/runs/demo"}})) << "MPI is the program's own";
  EXPECT_FALSE(is_unfinished({.code = 0, .report = {.starting = true}})) << "no run";
  EXPECT_FALSE(is_unfinished({.code = 1, .report = {.starting = true, .run = "/runs/demo"}}));
}

TEST(Verdict, HostsAreAskedWhereOneMayBeTheCause) {
  EXPECT_EQ(times_to_ask_hosts(lost_rank(), false), 1) << "its host may be gone";
  EXPECT_EQ(times_to_ask_hosts({.code = 1, .report = {.launcher_error = "PRTE has lost communication"}}, false), 1);
  EXPECT_GT(times_to_ask_hosts({.code = 14, .report = {.failed_rank = 1}}, false), 1) << "MPI may have ended the rank";
  EXPECT_GT(times_to_ask_hosts({.code = 255}, false), 1) << "Hydra does not say why, and the host may just go down";
  EXPECT_EQ(times_to_ask_hosts({.code = 1, .report = {.returned_code = 1}}, false), 0) << "all ranks were there";
  EXPECT_EQ(times_to_ask_hosts({.code = 64}, false), 0);
  EXPECT_EQ(times_to_ask_hosts({.code = 255}, /*stop_requested=*/true), 0);
}

TEST(Verdict, PreemptionsAreCountedApart) {
  auto sigterm = lost_rank();
  sigterm.report.run = "/runs/demo";
  EXPECT_FALSE(is_preemption(sigterm)) << "signal 9 may be anything's";
  sigterm.report.lost_rank->signal = SIGTERM;
  EXPECT_TRUE(is_preemption(sigterm));
  const JobEnd node{.code = 1,
                    .report = {.run = "/runs/demo", .launcher_error = "Slurm has lost the node n2", .lost_host = "n2"}};
  EXPECT_TRUE(is_preemption(node));
  EXPECT_TRUE(is_preemption({.code = 1, .report = {.run = "/runs/demo", .preempted = true}}));
  EXPECT_TRUE(is_preemption({.launcher_signal = SIGTERM, .report = {.run = "/runs/demo"}}));
  EXPECT_FALSE(is_preemption({.code = 1, .report = {.run = "/runs/demo"}})) << "an exception";
  auto never_ran = node;
  never_ran.report.run.clear();
  EXPECT_FALSE(is_preemption(never_ran)) << "a node that is never there would be tried for ever";

  never_ran.host_is_excused = true;
  EXPECT_TRUE(is_preemption(never_ran)) << "the job goes on without it";

  const JobRequirements requirements{.ranks = 2, .min_workers = 2, .max_failures = 0, .max_preemptions = 2};
  for (const auto& end : {sigterm, node}) {
    EXPECT_TRUE(decide(end, {.count = 2}, requirements, 2, false).again) << "though no failure is";
    EXPECT_FALSE(decide(end, {.count = 3}, requirements, 2, false).again);
    EXPECT_TRUE(decide(end, {.count = 1000}, {.ranks = 2, .max_preemptions = -1}, 2, false).again);
    EXPECT_FALSE(decide(end, {.count = 1}, requirements, 2, /*stop_wished=*/true).again);
  }
  EXPECT_EQ(decide(sigterm, {.count = 1}, requirements, 2, false).wait.count(), 1)
      << "it may be meant for the whole job";
  EXPECT_EQ(decide(node, {.count = 1}, requirements, 2, false).wait.count(), 0);
  EXPECT_FALSE(decide({.code = 1}, {.count = 1}, requirements, 2, false).again);
}

/// The progress of a run whose newest checkpoint is of this step; none for -1.
run::RunPoints at_step(int step) {
  if (step < 0) return {};
  return {{"", {.global_step = step + 1}}};
}

/// When a job that always ends so, with newest checkpoints of these steps, is started: seconds of a clock that only
/// waits move.
std::vector<int> starts(int max_failures, const std::vector<int>& steps) {
  std::vector<int> times{0};
  Failures failures;
  for (const int step : steps) {
    failures = failures.with_one_more(at_step(step));
    const auto next = decide(lost_rank(), failures, {.ranks = 2, .max_failures = max_failures}, 2, false);
    if (!next.again) break;
    times.push_back(times.back() + static_cast<int>(next.wait.count()));
  }
  return times;
}

TEST(Verdict, AlwaysCrashing) {
  EXPECT_EQ(starts(0, std::vector(20, -1)), (std::vector{0}));
  EXPECT_EQ(starts(4, std::vector(20, -1)), (std::vector{0, 0, 1, 3, 7}));
  EXPECT_EQ(starts(-1, std::vector(10, -1)), (std::vector{0, 0, 1, 3, 7, 15, 31, 63, 123, 183, 243}));
  EXPECT_EQ(run::retry_delay({.count = 1'000'000}).count(), 60);
}

TEST(Verdict, AFolderThatCannotBeReadIsNoProgress) {
  const auto failures = run::add_failure({.count = 2, .furthest = at_step(5)}, "/no/such/run");
  EXPECT_EQ(failures.count, 3);
  EXPECT_EQ(failures.furthest.at("").global_step, 6);
}

TEST(Verdict, ProgressResetsTheCount) {
  EXPECT_EQ(starts(2, {0, 1, 2, 3, 4}), (std::vector{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(starts(2, {0, 0, 1, 1, 1, 1}), (std::vector{0, 0, 1, 1, 2}));
  EXPECT_EQ(starts(2, {4, 3, 4, 5}), (std::vector{0, 0, 1}))
      << "an older checkpoint is no progress, nor the same again";
}

TEST(Verdict, WhatIsProgress) {
  const auto count_after = [](run::RunPoint before, run::RunPoint now) {
    return Failures{.count = 2, .furthest = {{"", before}}}.with_one_more({{"", now}}).count;
  };
  EXPECT_EQ(count_after({2, 1, 3, 0, "a"}, {2, 1, 4, 0, "b"}), 3) << "another report after the same batch";
  EXPECT_EQ(count_after({2, 1, 3, 0, "a"}, {3, 1, 4, 0, "a"}), 1) << "a later batch";
  EXPECT_EQ(count_after({2, 1, 3, 0, "a"}, {2, 2, 4, 0, "a"}), 1) << "a later epoch";
  EXPECT_EQ(count_after({0, 0, 3, 0, "a"}, {0, 0, 4, 0, "a"}), 3) << "no batches are counted, the same state";
  EXPECT_EQ(count_after({0, 0, 3, 0, "a"}, {0, 0, 4, 0, "b"}), 1) << "no batches are counted, another state";
  EXPECT_EQ(count_after({0, 0, 3, 0, ""}, {0, 0, 4, 0, ""}), 1) << "the program saves no state";
  EXPECT_EQ(count_after({9, 5, 9, 0, "a"}, {3, 1, 4, 1, "b"}), 1) << "the user has rolled it back";
  const Failures trials{.count = 2, .furthest = {{"trial_00000", {.global_step = 5}}}};
  EXPECT_EQ(trials.with_one_more({{"trial_00000", {.global_step = 5}}, {"trial_00001", {}}}).count, 1);
  EXPECT_EQ(trials.with_one_more({{"trial_00000", {.global_step = 4}}}).count, 3);
}

TEST(Verdict, FewerRanksWhereThereAreNoMore) {
  const JobRequirements requirements{.ranks = 8, .min_workers = 3, .max_failures = -1};
  const JobEnd none{.code = 1, .report = {.launcher_error = "There are not enough slots"}};
  EXPECT_EQ(decide(none, {.count = 1}, requirements, 8, false).ranks, 4);
  EXPECT_EQ(decide(none, {.count = 2}, requirements, 4, false).ranks, 3);
  EXPECT_EQ(decide(lost_rank(), {.count = 1}, requirements, 3, false).ranks, 8);
}

TEST(Verdict, AsManyRanksAsTheStateTakes) {
  const JobRequirements requirements{.ranks = 4, .min_workers = 2, .max_failures = 0};
  const JobEnd end{.code = 65, .report = {.required_ranks = 3}};
  for (const int ranks : {2, 4}) {
    const auto next = decide(end, {}, requirements, ranks, false);
    EXPECT_TRUE(next.again);
    EXPECT_EQ(next.ranks, 3);
    EXPECT_FALSE(decide(end, {}, requirements, ranks, /*stop_wished=*/true).again);
  }
  EXPECT_FALSE(decide(end, {}, requirements, 3, false).again);
  EXPECT_FALSE(decide(end, {}, {.ranks = 2, .min_workers = 2}, 2, false).again) << "there can never be so many";
}

TEST(Verdict, OneRootCause) {
  auto end = lost_rank();
  end.report.error = "rank 0 (n1): waiting for rank 1";
  EXPECT_TRUE(cause_of(end, "").starts_with("rank 1 (n1) was ended by signal 9 (Killed)"));
  EXPECT_EQ(cause_of({.code = 65, .report = {.error = "opening x.h5"}}, "older"), "opening x.h5");
  EXPECT_EQ(cause_of({.code = 75}, "rank 1 (n1): stuck"), "rank 1 (n1): stuck");
  EXPECT_EQ(cause_of({.code = 7, .report = {.failed_rank = 1}}, ""), "the program ended with exit code 7 on rank 1");
  EXPECT_EQ(cause_of({.code = 1, .report = {.slurm = "srun: error: No route"}}, ""),
            "no rank has started: srun: error: No route");
  EXPECT_EQ(cause_of({.code = 7, .report = {.failed_rank = 1, .slurm = "srun: error: No route"}}, ""),
            "the program ended with exit code 7 on rank 1");
  end.report.run = "/runs/demo";
  EXPECT_EQ(log_hint(end), "The log of rank 1 is /runs/demo/logs/rank_00001.log");
  const auto stopped = static_cast<int>(ExitCode::stopped);
  EXPECT_EQ(cause_of({.code = stopped, .report = {.error = "state saved", .lost_rank = LostRank{2, "n2", 15}}}, ""),
            "state saved");
  EXPECT_EQ(cause_of({.code = 137, .report = {.returned_code = stopped, .launcher_error = "n2 is lost"}}, ""),
            "stopped on request");
  EXPECT_EQ(cause_of({.code = 137,
                      .report = {.lost_rank = LostRank{2, "n2", 9}, .launcher_error = "n2 is lost", .lost_host = "n2"}},
                     ""),
            "n2 is lost");
}

class LaunchCommandTest : public testing::Test {
 protected:
  Environment environment = [this](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  static constexpr const char* open_mpi_4 = "Open MPI v4.1.4";
  LaunchCommand command(const Launcher& launcher, int ranks, const Hosts& lost = {},
                        const std::string& mpi = open_mpi_4) {
    return launch_command({launcher, "/bin/launcher", mpi}, options, ranks, lost,
                          {.id = "7", .started = "now", .full_worker_count = 4}, {"/tmp/t", "/dev/shm/s"}, environment);
  }
  static std::string value(const LaunchCommand& command, const std::string& name) {
    for (const auto& [key, text] : command.environment)
      if (key == name) return text;
    return "missing";
  }

  std::map<std::string, std::string> variables;
  SuperviseOptions options{.command = {"./fit", "--epochs", "3"}, .max_failures = 5};
};

TEST_F(LaunchCommandTest, HereByMpirun) {
  variables["OMPI_MCA_hwloc_base_binding_policy"] = "core";
  const auto made = command(open_mpi, 2);
  EXPECT_EQ(made.words, (std::vector<std::string>{"/bin/launcher", "-n", "2", "./fit", "--epochs", "3"}));
  EXPECT_EQ(value(made, "MUSTER_SUPERVISED"), "1");
  EXPECT_EQ(value(made, "MUSTER_MAX_FAILURES"), "5");
  EXPECT_EQ(value(made, "MUSTER_FULL_WORKERS"), "4");
  EXPECT_EQ(value(made, "OMPI_MCA_odls_base_sigkill_timeout"), "0");
  EXPECT_EQ(value(made, "OMPI_MCA_btl_vader_backing_directory"), "/dev/shm/s");
  EXPECT_EQ(value(made, "OMPI_MCA_hwloc_base_binding_policy"), "missing");  // the user's own stays
}

TEST_F(LaunchCommandTest, OnHosts) {
  options.hosts = "n1,n2:4";
  const auto made = command(open_mpi, 5);
  const auto& words = made.words;
  EXPECT_NE(std::find(words.begin(), words.end(), "n1,n2:4"), words.end());
  EXPECT_NE(std::find(words.begin(), words.end(), "MUSTER_SUPERVISED"), words.end());
  EXPECT_EQ(value(made, "OMPI_MCA_btl_vader_backing_directory"), "missing");
  EXPECT_EQ(wanted_ranks(options, environment, 1, open_mpi), 5);
  EXPECT_EQ(ranks_without({"n2"}, options, 5, environment, open_mpi), 1);
  EXPECT_EQ(ranks_without({"n1"}, options, 10, environment, open_mpi), 8);
  EXPECT_EQ(command(open_mpi, 4, {"n1"}).words[4], "n2:4");
  const auto passed = launch_command({open_mpi, "/bin/launcher", open_mpi_4}, options, 5, {}, {.id = "7"}, {},
                                     environment, {"MUSTER_NAME", "MUSTER_SUPERVISOR"})
                          .words;
  EXPECT_EQ(std::ranges::count(passed, "MUSTER_NAME"), 1) << "rank 0 may be elsewhere";
  EXPECT_EQ(std::ranges::count(passed, "MUSTER_SUPERVISOR"), 1) << "mpirun refuses a name twice";
  EXPECT_EQ(value(made, "MUSTER_JOB_END_TIME"), "missing");
  const auto in_job =
      launch_command({open_mpi, "/bin/launcher", open_mpi_4}, options, 5, {},
                     {.id = "7", .used = std::chrono::seconds(90), .job_end = 1'800'000'000}, {}, environment);
  EXPECT_EQ(value(in_job, "MUSTER_USED_SECONDS"), "90") << "not a time of this host's clock";
  EXPECT_EQ(value(in_job, "MUSTER_JOB_END_TIME"), "1800000000");
  EXPECT_EQ(std::ranges::count(in_job.words, "MUSTER_JOB_END_TIME"), 1);
}

TEST_F(LaunchCommandTest, KnowsAHostByItsFirstLabel) {
  options.hosts = "n1.cluster:2,n2.cluster:2";
  EXPECT_EQ(ranks_without({"n1"}, options, 4, environment, open_mpi), 2);
  EXPECT_EQ(command(open_mpi, 2, {"n1"}).words[4], "n2.cluster:2");
  options.hosts = "n1:2,n2:2";
  EXPECT_EQ(ranks_without({"n2.cluster"}, options, 4, environment, open_mpi), 2);
  EXPECT_EQ(ranks_without({"n1"}, options, 2, environment, open_mpi), 2) << "the other host has the slots";
  options.hosts = "N1:2, n2:2 ,root@n3:2";
  EXPECT_EQ(ranks_without({"n1"}, options, 6, environment, open_mpi), 4);
  EXPECT_EQ(name_in_hosts(options, "n1"), "N1");
  EXPECT_EQ(name_in_hosts(options, "n3"), "root@n3") << "to log in to";
  const auto all = command(open_mpi, 6);
  EXPECT_EQ(all.words[4], "N1:2,n2:2,n3:2");
  EXPECT_EQ(value(all, "OMPI_MCA_plm_rsh_args"), "-l root");
  EXPECT_EQ(value(command(hydra, 6), "HYDRA_LAUNCHER_EXTRA_ARGS"), "-l root");
  variables["OMPI_MCA_plm_rsh_args"] = "-p 2222";
  EXPECT_EQ(value(command(open_mpi, 6), "OMPI_MCA_plm_rsh_args"), "-l root -p 2222");
  options.hosts = "root@localhost:1,root@127.0.0.1";
  EXPECT_EQ(other_hosts(options, "n1"), Hosts());
  options.hosts = "10.0.0.1:2,10.0.0.2:2";
  EXPECT_EQ(ranks_without({"10.0.0.1"}, options, 4, environment, open_mpi), 2);
  EXPECT_EQ(ranks_without({"10"}, options, 4, environment, open_mpi), 4);
}

TEST_F(LaunchCommandTest, InSlurm) {
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &open_mpi);
  EXPECT_EQ(wanted_ranks(options, environment, 6, open_mpi), 6);
  variables = {{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "1"}, {"SLURM_NTASKS", "8"}};
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &open_mpi);
  EXPECT_EQ(wanted_ranks(options, environment, 6, open_mpi), 8);
  variables["SLURM_JOB_NUM_NODES"] = "2";
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &srun);
  const auto made = command(srun, 8);
  EXPECT_EQ(made.words[1], "--mpi=pmix");
  EXPECT_EQ(made.words[2], "--kill-on-bad-exit=0") << "it asks the other ranks to save, and waits for KillWait";
  const auto without = command(srun, 4, {"n2"}).words;
  EXPECT_EQ(without[3], "--exclude=n2");
  EXPECT_EQ(without[4], "--nodes=1") << "or srun asks for two, of which it has excluded one";
  EXPECT_EQ(ranks_without({"n2"}, options, 8, environment, srun), 4);
  options.hosts = "n1";
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &open_mpi);
}

TEST_F(LaunchCommandTest, InSlurmWithoutTasks) {
  variables = {{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "4"}, {"SLURM_JOB_CPUS_PER_NODE", "4(x3),2"}};
  EXPECT_EQ(wanted_ranks(options, environment, 6, open_mpi), 14) << "the CPUs of all nodes";
  variables["SLURM_JOB_NUM_NODES"] = "1";
  EXPECT_EQ(wanted_ranks(options, environment, 6, open_mpi), 6) << "the cores of this one";
  variables["SLURM_JOB_NUM_NODES"] = "3";
  variables["SLURM_JOB_CPUS_PER_NODE"] = "16(x3)";
  variables["SLURM_CPUS_PER_TASK"] = "10";
  EXPECT_EQ(wanted_ranks(options, environment, 6, open_mpi), 3) << "a rank does not take CPUs of two nodes";
  EXPECT_EQ(value(command(srun, 3), "SRUN_CPUS_PER_TASK"), "10");
  EXPECT_EQ(value(command(srun, 4), "SRUN_CPUS_PER_TASK"), "missing") << "there is no room for so many";
  variables.erase("SLURM_CPUS_PER_TASK");
  options.ranks = 6;
  EXPECT_EQ(command(srun, 6, {"n2"}).words[4], "--nodes=2") << "not on one that has 16 CPUs";
  options.ranks = 2;
  options.spares = 1;
  EXPECT_EQ(command(srun, 2).words[3], "--nodes=2");
}

TEST_F(LaunchCommandTest, InAHeterogeneousSlurmJob) {
  variables = {{"SLURM_JOB_ID", "12"},
               {"SLURM_HET_SIZE", "2"},
               {"SLURM_JOB_NUM_NODES_HET_GROUP_0", "1"},
               {"SLURM_JOB_NUM_NODES_HET_GROUP_1", "2"},
               {"SLURM_NTASKS_HET_GROUP_0", "1"},
               {"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1", "2(x2)"}};
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &srun) << "not mpirun on the first host";
  EXPECT_EQ(wanted_ranks(options, environment, 8, open_mpi), 5);
  options.command = {"./fit"};
  EXPECT_EQ(command(srun, 5).words,
            (std::vector<std::string>{"/bin/launcher", "--mpi=pmix", "--kill-on-bad-exit=0", "--het-group=0", "-n", "1",
                                      "./fit", ":", "--mpi=pmix", "--kill-on-bad-exit=0", "--het-group=1", "-n", "4",
                                      "./fit"}));
  EXPECT_EQ(std::ranges::count(command(srun, 1).words, ":"), 0) << "a component without ranks";
  variables["SLURM_JOB_NODELIST_HET_GROUP_0"] = "m1";
  variables["SLURM_JOB_NODELIST_HET_GROUP_1"] = "n7,n[1,08-10]";
  EXPECT_EQ(command(srun, 3, {"n09"}).words,
            (std::vector<std::string>{"/bin/launcher", "--mpi=pmix", "--kill-on-bad-exit=0", "--het-group=0", "-n", "1",
                                      "./fit", ":", "--mpi=pmix", "--kill-on-bad-exit=0", "--exclude=n09",
                                      "--het-group=1", "--nodes=1", "-n", "2", "./fit"}));
  EXPECT_EQ(command(srun, 4, {"m1"}).words,
            (std::vector<std::string>{"/bin/launcher", "--mpi=pmix", "--kill-on-bad-exit=0", "--het-group=1", "-n", "4",
                                      "./fit"}));
}

TEST_F(LaunchCommandTest, SettingsOfOpenMpi5) {
  const auto made = command(open_mpi, 2, {}, "Open MPI v5.0.11");
  EXPECT_EQ(value(made, "PRTE_MCA_rmaps_default_mapping_policy"), "slot:oversubscribe");
  EXPECT_EQ(value(made, "PRTE_MCA_hwloc_default_binding_policy"), "none");
  EXPECT_EQ(value(made, "OMPI_MCA_btl_sm_backing_directory"), "/dev/shm/s");
  EXPECT_EQ(value(made, "OMPI_ALLOW_RUN_AS_ROOT"), "1");
  EXPECT_EQ(value(made, "OMPI_MCA_rmaps_base_oversubscribe"), "missing");
}

TEST_F(LaunchCommandTest, SettingsOfSpectrumMpi) {
  const auto made = command(open_mpi, 2, {}, "IBM Spectrum MPI 10.4");
  EXPECT_EQ(value(made, "OMPI_MCA_rmaps_base_oversubscribe"), "1") << "it is made of an Open MPI before 5";
}

TEST_F(LaunchCommandTest, ByHydra) {
  for (const char* const mpi : {"MPICH Version:      4.0.2", "Intel(R) MPI Library 2021.7", "MVAPICH2 Version 2.3"})
    EXPECT_EQ(&launcher_for(options, environment, mpi), &hydra) << mpi;
  const auto here = command(hydra, 2);
  EXPECT_EQ(here.words, (std::vector<std::string>{"/bin/launcher", "-n", "2", "./fit", "--epochs", "3"}));
  EXPECT_EQ(value(here, "HYDRA_LAUNCHER"), "fork") << "in a Slurm job it would use srun";
  EXPECT_EQ(value(here, "MUSTER_SUPERVISED"), "1");
  options.hosts = "n1:2,n2:2,n3:2";
  const auto there = command(hydra, 4, {"n2"});
  EXPECT_EQ(there.words,
            (std::vector<std::string>{"/bin/launcher", "-n", "4", "-hosts", "n1:2,n3:2", "./fit", "--epochs", "3"}));
  EXPECT_EQ(value(there, "HYDRA_LAUNCHER"), "missing");
}

TEST_F(LaunchCommandTest, StartsSeveralPrograms) {
  options = {.command = {"-n", "2", "./heat", "-x", ":", "-n", "1", "./train"}};
  options = with_ranks_of_programs(options);
  EXPECT_EQ(wanted_ranks(options, environment, 8, open_mpi), 3);
  using Words = std::vector<std::string>;
  EXPECT_EQ(command(open_mpi, 3).words, (Words{"/bin/launcher", "-n", "2", "./heat", "-x", ":", "-n", "1", "./train"}));
  options.hosts = "n1:2,n2:1";
  EXPECT_EQ(command(hydra, 3).words,
            (Words{"/bin/launcher", "-n", "2", "-hosts", "n1:2,n2:1", "./heat", "-x", ":", "-n", "1", "./train"}));
  const auto words = command(open_mpi, 3).words;
  EXPECT_EQ(std::ranges::count(words, "n1:2,n2:1"), 2) << "mpirun has hosts and variables for each program";
  EXPECT_EQ(std::ranges::count(words, "MUSTER_SUPERVISED"), 2);
  EXPECT_NO_THROW(check(options, 3, 3, environment, open_mpi));
}

TEST_F(LaunchCommandTest, RefusesSeveralProgramsWithoutTheirRanks) {
  using Words = std::vector<std::string>;
  const auto expect_refused = [](const SuperviseOptions& refused, const std::string& text) {
    EXPECT_SAYS(test::error_of([&] { with_ranks_of_programs(refused); }, ExitCode::usage), text);
  };
  expect_refused({.command = {"./heat", ":", "-n", "1", "./train"}}, "the command has a \":\"");
  for (const auto& words : {Words{"-n", "2", "./heat", ":", "./train"}, Words{"-n", "2"},
                            Words{"-n", "2", "./heat", ":"}, Words{"-n", "2", "--", "./heat"}})
    expect_refused({.command = words}, "a program of several is named without -n and its number of ranks");
  for (const char* const ranks : {"x", "0", "-1"})
    expect_refused({.command = {"-n", ranks, "./heat"}}, "is not the number of ranks of ./heat");
  const Words two{"-n", "2", "./heat", ":", "-n", "1", "./train"};
  expect_refused({.command = two, .ranks = 3}, "--ranks is given for several programs, each of which has its own");
  expect_refused({.command = two, .min_workers = 2}, "--min-workers is given for several programs");
  options = with_ranks_of_programs({.command = two});
  EXPECT_SAYS(test::error_of([&] { check(options, 3, 3, environment, srun); }, ExitCode::usage),
              "srun starts several programs only when it is called by hand. Write srun --multi-prog");
}

TEST_F(LaunchCommandTest, HowTasksOfSrunFindEachOther) {
  variables = {{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "2"}};
  const auto way = [&](const char* mpi) {
    EXPECT_EQ(&launcher_for(options, environment, mpi), &srun) << mpi;
    return command(srun, 4, {}, mpi).words[1];
  };
  EXPECT_EQ(way("Open MPI v5.0.11"), "--mpi=pmix");
  EXPECT_EQ(way("MPICH Version:      4.0.2"), "--mpi=pmi2");
  EXPECT_EQ(way("Intel(R) MPI Library 2021.7"), "--mpi=pmi2");
  EXPECT_EQ(way("MPI VERSION    : CRAY MPICH version 8.1.25.17"), "--mpi=cray_shasta");
  variables["SLURM_JOB_NUM_NODES"] = "1";
  EXPECT_EQ(&launcher_for(options, environment, "MPI VERSION    : CRAY MPICH version 8.1.25.17"), &srun);
}

TEST_F(LaunchCommandTest, InFlux) {
  variables = {{"FLUX_URI", "local:///run/flux/local"}};
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &flux);
  EXPECT_EQ(command(flux, 4, {"n2", "n3"}).words,
            (std::vector<std::string>{"/bin/launcher", "run", "-n", "4", "-o", "exit-on-error",
                                      "--requires=-host:n2,n3", "./fit", "--epochs", "3"}));
  EXPECT_EQ(ranks_without({"n2"}, options, 4, environment, flux), 4) << "Flux knows what it has";
  variables["FLUX_TASK_RANK"] = "0";
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &open_mpi) << "in a task of a job";
  variables.erase("FLUX_TASK_RANK");
  variables.insert({{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "3"}, {"SLURM_NTASKS", "24"}});
  EXPECT_EQ(wanted_ranks(options, environment, 6, flux), 6) << "the instance may be a part of the Slurm job";
  EXPECT_EQ(ranks_without({"n2"}, options, 4, environment, flux), 4);
  options.hosts = "n1";
  EXPECT_EQ(&launcher_for(options, environment, open_mpi_4), &open_mpi);
}

TEST_F(LaunchCommandTest, InPbsAndLsf) {
  EXPECT_EQ(hosts_of_slots(""), "");
  EXPECT_EQ(hosts_of_slots("n1\nn1\nn2\nn1\n"), "n1:3,n2:1");
  const auto file = testing::TempDir() + "muster_nodefile." + std::to_string(::getpid());
  for (const char* const variable : {"PBS_NODEFILE", "LSB_DJOB_HOSTFILE"}) {
    std::ofstream(file) << "n1.cluster\nn1.cluster\nn2.cluster\nn2.cluster\n";
    variables = {{variable, file}};
    EXPECT_EQ(with_hosts_of_job(options, environment).hosts, "n1.cluster:2,n2.cluster:2");
    EXPECT_EQ(with_hosts_of_job(options, environment).ranks, 4);
    auto spared = options;
    spared.spares = 2;
    EXPECT_EQ(with_hosts_of_job(spared, environment).ranks, 2);
    std::ofstream(file) << "n1\nn1\n";
    EXPECT_EQ(with_hosts_of_job(options, environment).hosts, "") << "mpirun needs no daemon here";
    EXPECT_EQ(with_hosts_of_job(options, environment).ranks, 2);
    auto given = options;
    given.ranks = 1;
    EXPECT_EQ(with_hosts_of_job(given, environment).ranks, 1);
    given.hosts = "n3";
    EXPECT_EQ(with_hosts_of_job(given, environment).hosts, "n3");
    variables["SLURM_JOB_ID"] = "12";
    EXPECT_FALSE(with_hosts_of_job(options, environment).ranks);
    variables = {{variable, "/does/not/exist"}};
    EXPECT_FALSE(with_hosts_of_job(options, environment).ranks);
  }
  std::filesystem::remove(file);
}

TEST_F(LaunchCommandTest, KeepsSpares) {
  options.hosts = "n1:2,n2:2,n3:2";
  options.spares = 2;
  EXPECT_EQ(wanted_ranks(options, environment, 8, open_mpi), 4);
  EXPECT_EQ(ranks_without({"n2"}, options, 4, environment, open_mpi), 4) << "n3 takes its ranks";
  EXPECT_EQ(ranks_without({"n2", "n3"}, options, 4, environment, open_mpi), 2);
  EXPECT_NO_THROW(check(options, 4, 6, environment, open_mpi));
  try {
    check(options, 5, 6, environment, open_mpi);
    ADD_FAILURE() << "there is no room";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("5 ranks and 2 spares are asked for, and there is room for 6"),
              std::string::npos)
        << error.what();
  }
  options.hosts = "n1:6";
  try {
    check(options, 4, 6, environment, open_mpi);
    ADD_FAILURE() << "no host is left when this one is lost";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--spares is 2 on a single host"), std::string::npos) << error.what();
  }
  options.spares = -1;
  EXPECT_THROW(check(options, 4, 6, environment, open_mpi), Error);
  options = {.command = {"./fit"}, .spares = 2};
  variables = {{"SLURM_JOB_ID", "12"}, {"SLURM_JOB_NUM_NODES", "3"}, {"SLURM_NTASKS", "6"}};
  EXPECT_EQ(wanted_ranks(options, environment, 8, open_mpi), 4);
  EXPECT_EQ(command(srun, 4).words[3], "--nodes=2");
  const auto without = command(srun, 4, {"n2"}).words;
  EXPECT_EQ(without[3], "--exclude=n2");
  EXPECT_EQ(without[4], "--nodes=2");
  EXPECT_EQ(ranks_without({"n2"}, options, 4, environment, srun), 4);
  EXPECT_EQ(ranks_without({"n2", "n3"}, options, 4, environment, srun), 2);
}

TEST(Slurm, NodesOutOfService) {
  EXPECT_EQ(nodes_out_of_service("n1 alloc\nn2 drng\nn3 down*\nn4 mix\nn5 drain*\nn6 fail\nn7 idle\n"),
            (std::set<std::string>{"n2", "n3", "n5", "n6"}));
  EXPECT_EQ(nodes_out_of_service(""), std::set<std::string>());
}

TEST(LostHosts, ThoseThatAnswerAreRemoved) {
  LostHosts lost({"sh", "-c", "echo welcome >&2; test $0 = n2 && $1 $2"});
  for (const char* const host : {"n1", "n2", "n3"}) lost.add(host);
  EXPECT_EQ(lost.answering(), Hosts()) << "they are asked after a while only";
  EXPECT_TRUE(lost.ask_all({}).empty());
  EXPECT_EQ(lost.hosts(), (Hosts{"n1", "n3"}));
  LostHosts without_shell({"sh", "-c", "\"$@\""});
  without_shell.add("n1");
  EXPECT_TRUE(without_shell.ask_all({"n2"}).empty());
  EXPECT_EQ(without_shell.hosts(), Hosts());
  EXPECT_EQ(without_shell.host_called("`uname"), "");
  LostHosts never({});
  never.add("n1");
  EXPECT_TRUE(never.ask_all({"n2"}).empty());
  EXPECT_EQ(never.hosts(), Hosts{"n1"});
  LostHosts without_program({"/no/such/program"});
  without_program.add("n1");
  EXPECT_TRUE(without_program.ask_all({"n2"}).empty());
  EXPECT_EQ(without_program.hosts(), Hosts{"n1"});
}

TEST(LostHosts, AreAskedForTheirNames) {
  LostHosts lost({"sh", "-c", "test $0 = 10.0.0.3 || echo here N${0##*.}.cluster"});
  EXPECT_EQ(lost.host_called("n2"), "") << "before they are asked";
  EXPECT_TRUE(lost.ask_all({"10.0.0.1", "10.0.0.2", "10.0.0.3"}).empty());
  EXPECT_EQ(lost.host_called("n2"), "10.0.0.2");
  EXPECT_EQ(lost.host_called("n3"), "");
}

TEST(LostHosts, ThoseThatCannotBeReachedAreNamed) {
  const std::string program =
      "case $0 in n1) $1 $2;; n2) echo 'ssh: connect to host n2 port 22: No route to host\r' >&2; exit 255;; "
      "n3) echo 'n3: Permission denied (publickey).' >&2; exit 255;; n4) exec sleep 100;; "
      "n5) $1 $2; exec sleep 100;; esac";
  using Reasons = std::map<std::string, std::string>;
  LostHosts lost({"sh", "-c", program});
  EXPECT_EQ(lost.ask_all({"n1", "n2", "n3", "n4", "n5"}, std::chrono::seconds(1)),
            (Reasons{{"n2", "ssh: connect to host n2 port 22: No route to host"}, {"n4", ""}}))
      << "one that does not let us in is there";
}

TEST(LostHosts, AHostThatGoesDownIsAskedAgain) {
  const TemporaryFolder folder("lost-hosts-");
  const auto file = (folder.path() / "asked").string();
  const std::string reason = "ssh: connect to host n1 port 22: No route to host";
  LostHosts lost({"sh", "-c",
                  "test -e " + file + " && echo '" + reason + "' >&2 || echo Connection closed by n1 >&2; touch " +
                      file + "; exit 255"});
  EXPECT_EQ(lost.ask_all({"n1"}), (std::map<std::string, std::string>{{"n1", reason}}));
}

TEST_F(LaunchCommandTest, LogsInToHosts) {
  EXPECT_EQ(login_program(environment).front(), "ssh");
  variables["HYDRA_LAUNCHER_EXEC"] = "/bin/agent -q";
  EXPECT_EQ(login_program(environment), (std::vector<std::string>{"/bin/agent", "-q"}));
  options.hosts = "n1.cluster:2,10.0.0.2";
  EXPECT_EQ(name_in_hosts(options, "n1"), "n1.cluster");
  EXPECT_EQ(name_in_hosts(options, "10.0.0.2"), "10.0.0.2");
  EXPECT_EQ(name_in_hosts(options, "n7"), "n7");
  EXPECT_EQ(other_hosts(options, "n1"), Hosts{"10.0.0.2"});
}

TEST_F(LaunchCommandTest, RefusesWhatCannotBe) {
  EXPECT_NO_THROW(check(options, 2, 2, environment, open_mpi));
  variables["OMPI_COMM_WORLD_SIZE"] = "2";
  EXPECT_THROW(check(options, 2, 2, environment, open_mpi), Error);
  variables.clear();
  EXPECT_THROW(check(options, 0, 2, environment, open_mpi), Error);
  options.min_workers = 3;
  EXPECT_THROW(check(options, 2, 2, environment, open_mpi), Error);
  options = {.command = {"./fit"}, .hosts = ",,"};
  EXPECT_THROW(check(options, wanted_ranks(options, environment, 2, open_mpi), 2, environment, open_mpi), Error);
  for (const char* const hosts : {"n1:x", "n1:0", "n1:4,n2:", "n1:2x", "./hosts", "n1 n2", "-n1", "root@:2", ":2",
                                  "root@n1,ann@n2", "root@n0,n1", "n1,root@n2"}) {
    options.hosts = hosts;
    EXPECT_THROW(check(options, 2, 2, environment, open_mpi), Error) << hosts;
  }
  EXPECT_NO_THROW(check(options, 2, 2, environment, open_mpi, "n1")) << "nobody logs in to this host";
  options = {};
  EXPECT_THROW(check(options, 2, 2, environment, open_mpi), Error);
}

}  // namespace
}  // namespace muster::detail::supervise::supervise_test
